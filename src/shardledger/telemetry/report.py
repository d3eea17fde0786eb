"""The ledger as a table for people: categories down, ranks across, predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import IO

from rich import box
from rich.console import Console
from rich.table import Table

CATEGORIES = (
    "params",
    "grads",
    "master",
    "optimizer",
    "activations",
    "communication",
    "temporary",
    "framework",
    "total",
)
RANKS_SHOWN = 4  # more do not fit a line; ledger.json has them all

RankLedger = Mapping[str, Mapping[str, int | None]]  # {"predicted": {category: bytes}, "measured": {...}}


def ledger_table(ranks: Sequence[RankLedger], stage: int) -> Table:
    """A table of MiB by category with two columns per rank; "-" where nothing is predicted or measured."""
    title = f"Ledger, MiB per rank (stage {stage}, {len(ranks)} rank{'s' if len(ranks) != 1 else ''})"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column("category", no_wrap=True)
    shown = ranks[:RANKS_SHOWN]
    for rank in range(len(shown)):
        table.add_column(f"rank {rank}\npredicted", justify="right", no_wrap=True)
        table.add_column("\nmeasured", justify="right", no_wrap=True)
    for category in CATEGORIES:
        cells = []
        for ledger in shown:
            cells += [mebibytes(ledger[side].get(category)) for side in ("predicted", "measured")]
        table.add_row(category, *cells, end_section=category == CATEGORIES[-2])
    if len(ranks) > len(shown):
        table.caption = f"{len(ranks) - len(shown)} more ranks are in ledger.json"
    return table


def print_ledger(ranks: Sequence[RankLedger], stage: int, stream: IO[str] | None = None) -> None:
    """Print the table; a file or a pipe is taken to be as wide as the table needs."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console = Console(file=stream, highlight=False, width=20 + 24 * RANKS_SHOWN)
    console.print(ledger_table(ranks, stage))
    for line in process_lines(ranks[:1]):
        console.print(line)


def process_lines(ranks: Sequence[Mapping[str, Mapping[str, int | None]]]) -> list[str]:
    """What the system says of each process, where the ledger counts live bytes of tensors."""
    return [
        f"process: {mebibytes(process['before_the_model'])} MiB resident before the model, {mebibytes(process['peak'])} MiB "
        f"at most; the ledger counts live bytes of tensors"
        for process in (rank["process"] for rank in ranks if "process" in rank)
    ]


def mebibytes(count: int | None) -> str:
    """Bytes as MiB with enough digits to tell a KiB; "-" for None."""
    if count is None:
        return "-"
    if count == 0:
        return "0"
    value = count / 2**20
    return f"{value:,.3f}" if value < 100 else f"{value:,.1f}"
