"""Measurements on file: what is measured stays when a run is cut short, and cases can be measured one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from side_by_side.cases import Case, Contender
from side_by_side.conductor import Measured

FILE = "measurements.json"
BEFORE = "measurements.before.json"
"""What was on file on other terms."""
Found = list[tuple[Case, list[Measured]]]


def set_aside(folder: Path, terms: str) -> str:
    """Move what is on file on other ``terms`` (versions, cores, rounds) out of the way; returns those, "" if there is none."""
    path = folder / FILE
    known = str(json.loads(path.read_text(encoding="utf-8")).get("terms")) if path.exists() else terms
    if known == terms:
        return ""
    path.replace(folder / BEFORE)
    return known


def add(folder: Path, terms: str, case: Case, rows: Sequence[Measured]) -> Found:
    """Put one case on file and return all that were measured on the same ``terms``. A case of the same title is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    set_aside(folder, terms)
    path = folder / FILE
    entries = json.loads(path.read_text(encoding="utf-8"))["cases"] if path.exists() else {}
    entries[case.title] = {"case": asdict(case), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps({"terms": terms, "cases": entries}) + "\n", encoding="utf-8")
    return [(Case(**entry["case"]), [_row(row) for row in entry["rows"]]) for entry in entries.values()]


def _row(entry: dict) -> Measured:  # type: ignore[type-arg]
    return Measured(**{**entry, "contender": Contender(**entry["contender"])})
