"""Rows of a plan, made from a few numbers: states by the account, activations as given."""

from __future__ import annotations

from collections.abc import Iterable

from shardledger.ledger.account import States, state_accounts
from shardledger.ledger.row import Row

GIB = 2**30
KEPT_WHEN_RECOMPUTED = 0.1
"""Share of the activations that recomputation leaves."""


def rows_of(
    parameters: float,
    world: int,
    *,
    activations: float,
    micro_batches: Iterable[int] = (8,),
    framework: float = 0.5,
    frozen: float = 0.0,
) -> list[Row]:
    """Every stage, offload and recomputation; `activations` and `framework` in GiB, of the largest micro-batch."""
    sizes = tuple(micro_batches)
    states = States(parameters=int(parameters), world=world, frozen=frozen)
    rows = []
    for account in state_accounts(states):
        for checkpointing in (False, True):
            for size in sizes:
                saved = int(activations * GIB * size / max(sizes))
                kept = int(saved * KEPT_WHEN_RECOMPUTED) if checkpointing else saved
                base = int(framework * GIB)
                rows.append(
                    Row(
                        stage=account.stage,
                        offload=account.offload,
                        checkpointing=checkpointing,
                        micro_batch=size,
                        **account.engine,
                        activations=kept,
                        communication=0,
                        temporary=0,
                        framework=base,
                        total=account.engine_total + kept + base,
                        host_bytes=account.host_bytes,
                        disk_bytes=account.disk_bytes,
                        peak_phase="backward",
                        peak_unit="blocks.0",
                        sent_bytes_per_step=account.sent_bytes_per_step,
                    )
                )
    return rows
