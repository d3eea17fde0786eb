"""Horizontal bars with whiskers as SVG text. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from side_by_side.numbers import Spread

WIDTH, LEFT, BAR, GAP = 760, 170, 14, 6
INK, OURS, THEIRS = "#333333", "#2b6cb0", "#a0aec0"


def draw(groups: Sequence[tuple[str, Sequence[tuple[str, Spread]]]]) -> str:
    """One group of bars per title: length is the median, the whisker runs from the lowest to the highest round."""
    largest = max((value.highest for _, pairs in groups for _, value in pairs), default=1.0)
    scale = (WIDTH - LEFT - 60) / max(largest, 1.0)
    y = 34
    parts = [_text(12, 20, "Speed relative to DDP (1.0), same run, median and range over rounds", weight="bold")]
    for title, pairs in groups:
        y += 14
        parts.append(_text(12, y, title, weight="bold"))
        top = y = y + 8
        for label, value in pairs:
            colour = OURS if label.startswith("shardledger") else THEIRS
            middle = y + BAR / 2
            parts += [
                _text(LEFT - 8, middle + 4, label, anchor="end"),
                f'<rect x="{LEFT}" y="{y}" width="{value.middle * scale:.1f}" height="{BAR}" fill="{colour}"/>',
                _line(LEFT + value.lowest * scale, middle, LEFT + value.highest * scale, middle),
                _text(LEFT + value.highest * scale + 6, middle + 4, f"{value.middle:.2f}"),
            ]
            y += BAR + GAP
        parts.append(_line(LEFT + scale, top - 3, LEFT + scale, y - GAP + 3, dashed=True))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 12}" font-family="sans-serif" '
    background = f'<rect width="{WIDTH}" height="{y + 12}" fill="white"/>'
    return "\n".join([head + 'font-size="12">', background, *parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"


def _line(x1: float, y1: float, x2: float, y2: float, *, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{INK}"{dash}/>'
