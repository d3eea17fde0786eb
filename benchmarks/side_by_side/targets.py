"""What the project promises beside its peers, and whether one run's figures meet it. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardledger.ledger.traffic import Wire, sent_bytes
from side_by_side.cases import DDP, Case, Contender, largest_unit, parameters
from side_by_side.conductor import Measured
from side_by_side.numbers import ratio, spread

RESHARDED = Contender("FSDP2", 3, "resharded")
TRANSIENT_BYTES = {"fp32": 8.0, "bf16": 6.0}
"""Most bytes per parameter of the largest unit at stage 3, by the precision that gradients travel in."""
START_SLACK_S = 0.5
TRAFFIC_TOLERANCE = 0.01


@dataclass(frozen=True)
class Verdict:
    """One target in one case."""

    target: str
    wanted: str
    measured: str
    met: bool


def verdicts(case: Case, rows: Sequence[Measured]) -> list[Verdict]:
    """Every target that the engines which ran can tell about."""
    ran = {row.contender: row for row in rows if row.seconds and not row.failed}
    ours = {c.stage: row for c, row in ran.items() if c.engine == "shardledger" and c.stage is not None}
    found: list[Verdict] = []
    for stage, row in sorted(ours.items()):
        found += _faster(stage, row, ran)
        found += _smaller(stage, row, ran)
        found += _alone(case, stage, row)
        if DDP in ran and row.starts and ran[DDP].starts:
            late = spread(row.starts).middle - spread(ran[DDP].starts).middle
            wanted = f"<= DDP + {START_SLACK_S} s"
            found.append(
                Verdict(f"stage {stage}, start to first step", wanted, f"{late:+.2f} s", late <= START_SLACK_S)
            )
    failed = [row.contender for row in rows if row.failed and row.contender.engine == "shardledger"]
    return found + [Verdict(f"stage {contender.stage} runs", "yes", "failed", met=False) for contender in failed]


def _faster(stage: int, row: Measured, ran: dict[Contender, Measured]) -> Iterator[Verdict]:
    limits = [(DDP, 1.0)] if stage < 3 else [(RESHARDED, 1.25)]
    limits += [(Contender("DeepSpeed", stage), 1.6 if stage == 3 else 1.0)]
    for peer, least in limits:
        if peer in ran:
            value = ratio(ran[peer].seconds, row.seconds)
            yield Verdict(f"stage {stage}, speed / {peer.label}", f">= {least:.2f}", str(value), value.middle >= least)


def _smaller(stage: int, row: Measured, ran: dict[Contender, Measured]) -> Iterator[Verdict]:
    peers = [peer for c, peer in ran.items() if c.engine != "shardledger" and c.stage == stage and peer.peak_bytes]
    if peers and row.peak_bytes:
        least = min(peers, key=lambda peer: peer.peak_bytes)
        share = row.peak_bytes / least.peak_bytes
        name = f"stage {stage}, peak RSS / least peer's ({least.contender.label})"
        yield Verdict(name, "<= 1.00", f"{share:.3f}", share <= 1)


def _alone(case: Case, stage: int, row: Measured) -> Iterator[Verdict]:
    if stage == 3 and row.transient_bytes:
        value, most = row.transient_bytes / largest_unit(case.model), TRANSIENT_BYTES[case.precision]
        name = "stage 3, transient bytes per parameter of the largest unit"
        yield Verdict(name, f"<= {most:.0f}", f"{value:.1f}", value <= most)
    if row.counted_bytes:
        item = 4 if case.precision == "fp32" else 2
        wire = Wire(trained=parameters(case.model), frozen=0, weight_bytes=item, gradient_bytes=item)
        formula = sent_bytes(stage, case.world, wire)
        share = spread(row.counted_bytes).middle / formula
        near = abs(share - 1) <= TRAFFIC_TOLERANCE
        yield Verdict(f"stage {stage}, bytes sent / formula", "0.99 .. 1.01", f"{share:.3f}", near)


def table(found: Sequence[tuple[Case, Sequence[Measured]]]) -> list[str]:
    """Markdown lines: one row per target, one column per case, misses in bold."""
    columns = {case.title: {v.target: v for v in verdicts(case, rows)} for case, rows in found}
    order = list(dict.fromkeys(target for column in columns.values() for target in column))
    if not order:
        return []
    met = sum(v.met for column in columns.values() for v in column.values())
    total = sum(len(column) for column in columns.values())
    lines = ["## Targets", "", f"{met} of {total} are met; a figure in bold misses its target.", ""]
    lines += ["| target | wanted | " + " | ".join(columns) + " |", "|---|---|" + "---:|" * len(columns)]
    for target in order:
        wanted = sorted({column[target].wanted for column in columns.values() if target in column})
        cells = [_cell(column.get(target)) for column in columns.values()]
        lines.append(
            f"| {target} | {' (bf16: '.join(reversed(wanted))}{')' if len(wanted) > 1 else ''} | {' | '.join(cells)} |"
        )
    return lines


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    return verdict.measured if verdict.met else f"**{verdict.measured}**"
