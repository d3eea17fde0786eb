"""From measurements to a table, a picture and latest.json. Imports no torch."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from side_by_side import targets
from side_by_side.cases import DDP, Case, largest_unit
from side_by_side.conductor import Measured, Protocol
from side_by_side.numbers import Spread, losses_agree, ratio, spread
from side_by_side.picture import draw

LOSS_TOLERANCE = 1e-3
"""Relative. Engines add ranks and round in other orders, and training spreads such differences; a wrong gradient shows
in the second step already."""

Found = Sequence[tuple[Case, list[Measured]]]


def disagreements(case: Case, rows: Sequence[Measured]) -> list[str]:
    """Engines whose losses are not those of the first one that ran, in fp32; with bf16 each rounds in its own way."""
    ran = [row for row in rows if row.losses and not row.failed]
    if case.precision != "fp32" or not ran:
        return []
    reference = next((row for row in ran if row.contender == DDP), ran[0])
    problems = []
    for row in ran:
        why = losses_agree(row.losses, reference.losses, LOSS_TOLERANCE)
        if why:
            problems.append(f"{row.contender.label} against {reference.contender.label}: {why}")
    return problems


def to_ddp(row: Measured, rows: Sequence[Measured]) -> Spread | None:
    """Speed relative to DDP in the same rounds; None when either has no numbers."""
    other = next((r for r in rows if r.contender == DDP), None)
    if other is None or other.failed or row.failed or not row.seconds:
        return None
    return ratio(other.seconds, row.seconds)


def json_rows(found: Found) -> list[dict[str, Any]]:
    """The rows of latest.json: one per engine and case that ran."""
    lines = []
    for case, rows in found:
        agree = not disagreements(case, rows)
        for row in rows:
            if row.failed or not row.seconds:
                continue
            relative = to_ddp(row, rows) if agree else None
            lines.append(
                {
                    "engine": " ".join(part for part in (row.contender.engine, row.contender.variant) if part),
                    "stage": row.contender.stage,
                    "model": case.model,
                    "world": case.world,
                    "precision": case.precision,
                    "tokens_per_s": case.tokens / spread(row.seconds).middle,
                    "ratio_to_ddp": relative.middle if relative else None,
                    "peak_rss_bytes": row.peak_bytes,
                    "transient_bytes": row.transient_bytes,
                    "sent_bytes": round(sent(row)),
                    "save_s": spread(row.saves).middle if row.saves else None,
                    "load_s": spread(row.loads).middle if row.loads else None,
                    "start_s": spread(row.starts).middle,
                }
            )
    return lines


def sent(row: Measured) -> float:
    """Bytes one rank sends per step: the engine's count where it has one, else the interface's, headers and all."""
    return spread(row.counted_bytes or row.wire_bytes).middle


def markdown(found: Found, protocol: Protocol, absent: Sequence[str]) -> str:
    """The document."""
    lines = [
        "# Side by side",
        "",
        f"{datetime.date.today()} · {machine()} · {protocol.rounds} rounds, engines in turns within one run.",
        "Medians; [lowest .. highest] over rounds. Ratios compare turns of the same round. Memory is of the largest rank.",
        "",
    ]
    lines += [f"Left out: {why}." for why in absent]
    for case, rows in found:
        lines += ["", f"## {case.title}", "", *table(case, rows)]
    judged = targets.table([(case, rows) for case, rows in found if not disagreements(case, rows)])
    lines += ["", *judged] if judged else []
    return "\n".join(lines) + "\n"


def table(case: Case, rows: Sequence[Measured]) -> list[str]:
    """One case."""
    problems = disagreements(case, rows)
    notes = [f"No ratios: the engines did not train alike. {problem}." for problem in problems]
    head = [
        "engine",
        "tokens/s",
        "speed / DDP",
        "CPU / step",
        "peak RSS",
        "transient",
        "B / parameter",
        "sent",
        "on the wire",
    ]
    head += ["save", "load", "start"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for row in rows:
        if row.failed or not row.seconds:
            notes.append(f"{row.contender.label} failed: {_in_short(row.failed or 'no turn')}")
            continue
        relative = to_ddp(row, rows)
        cells = [
            row.contender.label,
            f"{case.tokens / spread(row.seconds).middle:.0f}",
            "" if problems or relative is None else str(relative),
            f"{spread(row.process_cpu_s).middle * 1e3:.0f} ms" if row.process_cpu_s else "",
            _mb(row.peak_bytes),
            _mb(row.transient_bytes),
            f"{row.transient_bytes / largest_unit(case.model):.1f}",
            _mb(sent(row)),
            _mb(spread(row.wire_bytes).middle),
            *(f"{spread(values).middle:.2f} s" if values else "" for values in (row.saves, row.loads, row.starts)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if case.precision == "fp32" and not problems and sum(bool(row.losses) and not row.failed for row in rows) > 1:
        notes.append(f"Losses of all engines that ran agree within {LOSS_TOLERANCE:g} at every step.")
    return lines + [""] + notes


def write(folder: Path, found: Found, protocol: Protocol, absent: Sequence[str]) -> list[Path]:
    """Table, picture and latest.json in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    document = folder / "side-by-side.md"
    document.write_text(markdown(found, protocol, absent), encoding="utf-8")
    numbers = folder / "latest.json"
    numbers.write_text(json.dumps({"rows": json_rows(found)}, indent=1) + "\n", encoding="utf-8")
    picture = folder / "side-by-side.svg"
    picture.write_text(draw(bars(found)), encoding="utf-8")
    return [document, numbers, picture]


def bars(found: Found) -> list[tuple[str, list[tuple[str, Spread]]]]:
    """What the picture shows: speed relative to DDP, one group per case."""
    groups = []
    for case, rows in found:
        if disagreements(case, rows):
            continue
        pairs = [(row.contender.label, to_ddp(row, rows)) for row in rows]
        groups.append((case.title, [(label, value) for label, value in pairs if value is not None]))
    return [(title, pairs) for title, pairs in groups if pairs]


def machine() -> str:
    """Cores and versions; nothing that names the machine."""
    names = ("torch", "deepspeed")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {', '.join(versions)}"


def _in_short(text: str) -> str:
    """The first and the last line of what a rank said."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"


def _mb(value: float) -> str:
    return f"{value / 1e6:.1f} MB"
