"""A plan as a picture: stacked bars against the device's memory, and the memory of one step over its course.

A picture is a list of shapes in pixels, x to the right and y down; ``svg`` writes it as a file. Nothing is drawn here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from shardledger.ledger.amounts import gib
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.row import Row

COLORS = dict(
    zip(
        CATEGORIES,
        # Okabe and Ito's palette, which colour-blind readers can tell apart.
        ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#D55E00", "#CC79A7", "#E69F00", "#999999"),
        strict=True,
    )
)
"""By category."""
PHASE_COLORS = {"init": "#999999", "forward": "#56B4E9", "backward": "#D55E00", "step": "#009E73"}
"""By phase of a step."""

Moment = tuple[str, str, int]
"""Phase, unit and most bytes of one stay of the program in a unit."""

_WIDTH, _LEFT, _RIGHT, _BAR, _GAP = 1040, 310, 110, 18, 8
_CHART = _WIDTH - _LEFT - _RIGHT
_TIMELINE_HEIGHT = 180
_CUT = 2.5
"""Devices' worth of bytes at which a bar is cut: one that fits must stay readable beside one that needs fifty times more."""


@dataclass(frozen=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    color: str
    title: str = ""
    """Shown when the pointer rests on it."""


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    color: str = "#000000"
    dashed: bool = False


@dataclass(frozen=True)
class Label:
    """A text whose ``anchor`` (``start``, ``middle`` or ``end``) is at x, its baseline at y."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    bold: bool = False


@dataclass
class Picture:
    """Shapes in the order in which they are drawn."""

    width: int = _WIDTH
    height: int = 0
    shapes: list[Rect | Line | Label] = field(default_factory=list)


def picture(
    rows: Sequence[Row], device_memory: int, timeline: Sequence[Moment] = (), title: str = "", where: str = ""
) -> Picture:
    """Bars of ``rows`` from top to bottom, then one step's ``timeline`` with its peak marked (``where``: which step's)."""
    drawn = Picture()
    y = 28
    if title:
        drawn.shapes.append(Label(16, y, title, bold=True))
        y += 24
    y = _legend(drawn, y)
    y = _bars(drawn, rows, device_memory, y)
    if timeline:
        y = _timeline(drawn, timeline, device_memory, y + 40, where)
    drawn.height = y + 20
    return drawn


def svg(drawn: Picture) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawn.width}" height="{drawn.height}" '
        f'viewBox="0 0 {drawn.width} {drawn.height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{drawn.width}" height="{drawn.height}" fill="#ffffff"/>',
        *map(_element, drawn.shapes),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def short_label(row: Row) -> str:
    """``stage 2 · optimizer:cpu · recomputed``."""
    parts = [f"stage {row.stage}"]
    if row.offload != "none":
        parts.append(row.offload)
    if row.checkpointing:
        parts.append("recomputed")
    return " · ".join(parts)


def scale_limit(totals: Iterable[int], device_memory: int) -> int:
    """Bytes at the right end of a chart: a little beyond the device, and never so far that the device vanishes."""
    largest = max([*totals, 1])
    return int(max(device_memory * 1.1, min(largest * 1.02, device_memory * _CUT)))


def _legend(drawn: Picture, y: int) -> int:
    x = 16.0
    for category in CATEGORIES:
        drawn.shapes += [Rect(x, y - 10, 12, 12, COLORS[category]), Label(x + 17, y, category)]
        x += 30 + 7.2 * len(category)
    return y + 24


def _bars(drawn: Picture, rows: Sequence[Row], device_memory: int, y: int) -> int:
    limit = scale_limit((row.total for row in rows), device_memory)
    per_byte = _CHART / limit
    top = y
    for row in rows:
        drawn.shapes.append(Label(_LEFT - 8, y + 13, short_label(row), "end"))
        x = float(_LEFT)
        for category in CATEGORIES:
            count = getattr(row, category)
            width = min(count * per_byte, _LEFT + _CHART - x)
            if width > 0:
                drawn.shapes.append(Rect(x, y, width, _BAR, COLORS[category], f"{category}: {gib(count)}"))
                x += width
        cut = row.total > limit
        if cut:  # a white notch says that the bar goes on
            drawn.shapes.append(Rect(_LEFT + _CHART - 14, y, 5, _BAR, "#ffffff"))
        drawn.shapes.append(Label(_LEFT + _CHART + 8, y + 13, gib(row.total), bold=row.total <= device_memory))
        y += _BAR + _GAP
    line = _LEFT + device_memory * per_byte
    drawn.shapes.append(Line(line, top - 6, line, y, dashed=True))
    drawn.shapes.append(Label(line, y + 12, f"device {gib(device_memory)}", "middle"))
    return y + 20


def _timeline(drawn: Picture, timeline: Sequence[Moment], device_memory: int, y: int, where: str) -> int:
    drawn.shapes.append(Label(16, y, f"one step{where}: most bytes in each unit", bold=True))
    y += 16
    bottom = y + _TIMELINE_HEIGHT
    peak = max(range(len(timeline)), key=lambda index: timeline[index][2])
    limit = max(device_memory if device_memory < 3 * timeline[peak][2] else 0, timeline[peak][2]) * 1.1
    step = (_WIDTH - _LEFT / 2 - _RIGHT) / len(timeline)
    left = _LEFT / 2
    for index, (phase, unit, count) in enumerate(timeline):
        height = count / limit * _TIMELINE_HEIGHT
        tip = f"{phase} {unit}: {gib(count)}"
        drawn.shapes.append(
            Rect(left + index * step, bottom - height, step, height, PHASE_COLORS.get(phase, "#999999"), tip)
        )
    phase, unit, count = timeline[peak]
    x = left + (peak + 0.5) * step
    head = bottom - count / limit * _TIMELINE_HEIGHT
    drawn.shapes += [Line(x, head - 12, x, head), Label(x, head - 16, f"peak {gib(count)}, {phase} {unit}", "middle")]
    if device_memory <= limit:
        level = bottom - device_memory / limit * _TIMELINE_HEIGHT
        right = left + step * len(timeline)
        drawn.shapes += [Line(left, level, right, level, dashed=True), Label(right + 6, level + 4, gib(device_memory))]
    drawn.shapes.append(Label(left - 8, bottom, "0", "end"))
    x = left
    for phase in dict.fromkeys(moment[0] for moment in timeline):
        drawn.shapes += [
            Rect(x, bottom + 10, 12, 12, PHASE_COLORS.get(phase, "#999999")),
            Label(x + 17, bottom + 20, phase),
        ]
        x += 40 + 7.2 * len(phase)
    return bottom + 24


def _element(shape: Rect | Line | Label) -> str:
    if isinstance(shape, Rect):
        size = f'x="{shape.x:.1f}" y="{shape.y:.1f}" width="{shape.width:.1f}" height="{shape.height:.1f}"'
        tip = f"<title>{escape(shape.title)}</title>" if shape.title else ""
        return f'<rect {size} fill="{shape.color}">{tip}</rect>'
    if isinstance(shape, Line):
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        ends = f'x1="{shape.x1:.1f}" y1="{shape.y1:.1f}" x2="{shape.x2:.1f}" y2="{shape.y2:.1f}"'
        return f'<line {ends} stroke="{shape.color}" stroke-width="1.5"{dash}/>'
    weight = ' font-weight="bold"' if shape.bold else ""
    where = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}"'
    return f"<text {where}{weight}>{escape(shape.text)}</text>"
