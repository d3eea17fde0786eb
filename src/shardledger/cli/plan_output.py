"""What ``shardledger plan`` prints in both of its forms: JSON rows, sentences, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from shardledger.cli.plan_write import by_unit
from shardledger.errors import DoesNotFitError
from shardledger.ledger.amounts import gib
from shardledger.ledger.fit import Situation, fits
from shardledger.ledger.recommend import Recommendation, describe
from shardledger.ledger.row import Row


def finish(answer: Recommendation | None, situation: Situation | None) -> None:
    """End with the right exit code. Raises DoesNotFitError when there is an answer and it is that nothing fits."""
    if answer is None or answer.row is not None or situation is None:
        return
    what = (
        f"{gib(answer.missing_bytes)} of device memory per rank are missing"
        if answer.missing_bytes
        else f"{gib(answer.missing_host_bytes)} of host memory per machine are missing"
    )
    raise DoesNotFitError(f"{what}: no stage, offload or recomputation fits {gib(situation.device_memory)} per device.")


def as_json(rows: Sequence[Row], answer: Recommendation | None, situation: Situation | None) -> dict[str, Any]:
    """The machine-readable form, in the documented keys."""
    return {"stages": [row_json(row, situation) for row in rows], "recommended": answer_json(answer)}


def row_json(row: Row, situation: Situation | None) -> dict[str, Any]:
    """One row; ``fits`` is null when no device memory was given."""
    names = (
        ("stage", "offload", "checkpointing", "params", "grads", "master", "optimizer")
        + ("activations", "communication", "temporary", "framework", "total", "peak_phase")
    )  # fmt: skip
    values = {name: getattr(row, name) for name in names}
    fit = None if situation is None else fits(row, situation)
    return {**values, "fits": fit, "sent_bytes_per_step": row.sent_bytes_per_step}


def answer_json(answer: Recommendation | None) -> dict[str, Any] | None:
    """What is recommended; null without device memory, and with null choices when nothing fits.

    Where units are not all alike, ``unit_stages`` and ``recomputed_units`` name those that differ.
    """
    if answer is None:
        return None
    row = answer.row
    return {
        "stage": row.stage if row else None,
        "offload": row.offload if row else None,
        "checkpointing": row.checkpointing if row else None,
        "micro_batch": row.micro_batch if row else None,
        **(by_unit(row) if row else {}),
        "reason": answer.reason,
    }


def print_json(content: dict[str, Any]) -> None:
    """To stdout, for programs."""
    print(json.dumps(content, indent=2))


def sentences(answer: Recommendation) -> str:
    """The recommendation as lines for people."""
    lines = ["recommended: " + _headline(answer)]
    lines += [f"  - {reason}" for reason in answer.reasons]
    lines += [f"  ! {caution}" for caution in answer.cautions]
    return "\n".join(lines)


def _headline(answer: Recommendation) -> str:
    if answer.row is None:
        return "nothing fits"
    return describe(answer.row) + (", LoRA adapters" if answer.adapters else "")


def aligned(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need, numbers to the right; the second column (a name) to the left."""
    widths = [max(len(line[i]) for line in [columns, *lines]) for i in range(len(columns))]

    def one(line: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([one(columns), *map(one, lines)])
