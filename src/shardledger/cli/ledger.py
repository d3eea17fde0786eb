"""``shardledger ledger RUN_DIR``: a run's bytes by category, predicted beside measured, with the error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardledger.errors import ConfigError
from shardledger.ledger import CATEGORIES

Side = Mapping[str, int | None]


def show(folder: str, rank: int | None = None) -> None:
    """Print the ledger of a run; of ``rank``, or of the rank whose total is predicted worst.

    Raises:
        ConfigError: there is no run in ``folder``, its ledger cannot be read, or it has no such rank.
    """
    content = read_ledger(folder)
    ranks = content["ranks"]
    if rank is not None and not 0 <= rank < len(ranks):
        raise ConfigError(f"--rank {rank}: the run in {folder} had {len(ranks)} ranks, 0 to {len(ranks) - 1}.")
    print_comparison(ranks, title=f"{folder}: stage {content['stage']}, {content['world']} rank(s)", rank=rank)


def read_ledger(folder: str) -> dict[str, Any]:
    """``ledger.json`` of a run folder, checked. Raises ConfigError."""
    path = Path(folder)
    file = path / "ledger.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{folder} holds no ledger.json: give the folder of a finished run (shardledger train writes one)."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a ledger: {error}.") from error
    ranks = content.get("ranks") if isinstance(content, dict) else None
    if not ranks or not all(isinstance(r, dict) and {"predicted", "measured"} <= r.keys() for r in ranks):
        raise ConfigError(f"{file} is no ledger: it must hold ranks, each with predicted and measured bytes.")
    return {"stage": "?", "world": len(ranks), **content}


def print_comparison(ranks: Sequence[Mapping[str, Side]], *, title: str, rank: int | None = None) -> None:
    """A table of one rank and a line about all."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from shardledger.telemetry.report import mebibytes, process_lines

    shown = worst_rank(ranks) if rank is None else rank
    table = Table(title=f"{title}; MiB of rank {shown}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("category", "predicted", "measured", "difference, bytes", "error"):
        table.add_column(name, justify="left" if name == "category" else "right", no_wrap=True)
    predicted, measured = ranks[shown]["predicted"], ranks[shown]["measured"]
    for category in (*CATEGORIES, "total"):
        expected, found = predicted.get(category), measured.get(category)
        known = expected is not None and found is not None
        table.add_row(
            category,
            mebibytes(expected),
            mebibytes(found),
            f"{expected - found:+,}" if known else "-",  # type: ignore[operator]
            percent(expected, found),
            end_section=category == CATEGORIES[-1],
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print(table)
    for line in (*phase_lines(ranks[shown]), *process_lines(ranks[shown : shown + 1])):
        console.print(line, soft_wrap=True)
    totals = [percent(r["predicted"].get("total"), r["measured"].get("total")) for r in ranks]
    if len(ranks) > 1:
        console.print(f"error of the total by rank: {', '.join(totals[:16])}{', ...' if len(totals) > 16 else ''}")


def phase_lines(rank: Mapping[str, Side]) -> list[str]:
    """Most bytes in each phase, predicted and measured, where the run counted them."""
    from shardledger.telemetry.report import mebibytes

    measured, predicted = rank.get("phases") or {}, rank.get("predicted_phases") or {}
    told = [f"{p} {mebibytes(predicted.get(p))} / {mebibytes(total)}" for p, total in measured.items()]
    return [f"by phase, predicted / measured MiB: {', '.join(told)}"] if told else []


def worst_rank(ranks: Sequence[Mapping[str, Side]]) -> int:
    """The rank whose total is predicted worst."""

    def miss(rank: int) -> float:
        expected, found = ranks[rank]["predicted"].get("total"), ranks[rank]["measured"].get("total")
        return abs(expected - found) / max(1, found) if expected is not None and found is not None else -1.0

    return max(range(len(ranks)), key=miss)


def percent(predicted: int | None, measured: int | None) -> str:
    """How far the prediction is off, of what was measured."""
    if predicted is None or measured is None:
        return "-"
    if predicted == measured:
        return "0 %"
    return f"{100 * (predicted - measured) / measured:+.2f} %" if measured else "-"
