"""``plan --model ... --verify``: a few real steps of what is recommended, on ranks of this machine's CPU."""

from __future__ import annotations

import sys

from shardledger.cli.plan_options import PlanOptions
from shardledger.cli.plan_question import Question
from shardledger.cli.plan_write import by_unit
from shardledger.errors import ConfigError
from shardledger.ledger.amounts import gib
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.row import Row

RANKS = 2
"""Most ranks that are started here."""
BYTES_PER_PARAMETER = 24
"""Host memory that a rank may need at stage 0: states of 18 bytes, the model as it was made, and what computing takes."""


def check_room(parameters: int, ranks: int) -> None:
    """Refuse a model that this machine cannot train for a moment. Raises ConfigError."""
    import psutil

    need, free = parameters * BYTES_PER_PARAMETER * ranks, psutil.virtual_memory().available
    if need > free:
        raise ConfigError(
            f"--verify trains the model for real on {ranks} ranks of this machine: that takes about {gib(need)} of host "
            f"memory and {gib(free)} are free. Verify a smaller model of the same kind."
        )


def ranks_for(options: PlanOptions) -> int:
    """Ranks to start: the plan's, as far as a machine without accelerators carries them."""
    return min(options.world, RANKS)


def print_verification(options: PlanOptions, question: Question, row: Row, *, quiet: bool) -> None:
    """Run ``row`` without its offload and print predicted beside measured, worst rank first.

    Args:
        options: the command line.
        question: what was planned.
        row: what is recommended.
        quiet: whether stdout belongs to a program; then it goes to stderr.

    Raises:
        RunFailure: a rank failed.
    """
    from shardledger.cli.verify import Verification, verify

    ranks = ranks_for(options)
    content = {key: value for key, value in question.config.items() if key not in ("train_batch_size",)}
    results = verify(
        Verification(
            model=question.model,
            config={**content, "train_micro_batch_size_per_gpu": row.micro_batch, "gradient_accumulation_steps": 1},
            world=ranks,
            stage=row.stage,
            checkpointing=row.checkpointing,
            micro_batch=row.micro_batch,
            seq_len=question.seq_len,
            trainable=question.trainable,
            by_unit=by_unit(row),
        )
    )
    out = sys.stderr if quiet else sys.stdout
    worst = max(range(len(results)), key=lambda rank: abs(results[rank].error))
    found = results[worst]
    without = "" if row.offload == "none" else f", without its offload {row.offload}"
    print(
        f"\nverified on {ranks} CPU rank{'s' if ranks > 1 else ''} of this machine (gloo, stage {row.stage}, micro-batch "
        f"{row.micro_batch}{without}), every live byte counted; rank {worst}, where the error is largest:\n"
        f"  {'':<14}{'predicted':>12}{'measured':>12}",
        file=out,
    )
    for category in (*CATEGORIES, "total"):
        predicted, measured = found.predicted[category], found.measured[category]
        print(f"  {category:<14}{gib(predicted):>12}{gib(measured):>12}", file=out)
    print(
        f"  error of the total {found.error:+.3%}; predicted peak in {found.predicted_at}, measured in {found.measured_at}",
        file=out,
    )
