"""Measurements on file: what is measured stays when a run is cut short, and cases can be measured one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from side_by_side.cases import Case, Contender
from side_by_side.conductor import Measured

FILE = "measurements.json"
Found = list[tuple[Case, list[Measured]]]


def add(folder: Path, terms: str, case: Case, rows: Sequence[Measured]) -> Found:
    """Put one case on file and return all that were measured on the same ``terms``: versions, cores, rounds.

    A case of the same title is replaced, and so is everything that was measured on other terms.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    entries = known.get("cases", {}) if known.get("terms") == terms else {}
    entries[case.title] = {"case": asdict(case), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps({"terms": terms, "cases": entries}) + "\n", encoding="utf-8")
    return [(Case(**entry["case"]), [_row(row) for row in entry["rows"]]) for entry in entries.values()]


def _row(entry: dict) -> Measured:  # type: ignore[type-arg]
    return Measured(**{**entry, "contender": Contender(**entry["contender"])})
