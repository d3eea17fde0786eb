"""The account of states: bytes per rank for every stage and offload from a parameter count, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shardledger.cli.plan_options import (
    Hardware,
    PlanOptions,
    framework_of,
    optimizer_of,
    parameter_count,
    precision_of,
    situation_of,
)
from shardledger.cli.plan_output import aligned, answer_json, finish, print_json, row_json, sentences
from shardledger.cli.plan_write import fresh_base, write_config
from shardledger.ledger.account import (
    StateAccount,
    States,
    gathered_bytes,
    state_accounts,
)
from shardledger.ledger.amounts import common_unit, gib, in_unit, parameters
from shardledger.ledger.categories import STATE_CATEGORIES
from shardledger.ledger.fit import Situation, fits
from shardledger.ledger.recommend import recommend
from shardledger.ledger.row import Row

LORA_FROZEN = 0.995
"""Share that is frozen when little data makes LoRA the first choice: rank 16 on every linear layer trains about 0.5 %."""


def plan_states(options: PlanOptions, hardware: Hardware) -> None:
    """Print the account, and a recommendation when device memory is given.

    Raises:
        ConfigError: wrong options.
        DoesNotFitError: no choice fits.
    """
    states = states_of(options)
    accounts = state_accounts(states)
    rows = _rows(states, options)
    situation = answer = None
    if hardware.device_memory is not None:
        situation = situation_of(
            options,
            hardware,
            hardware.device_memory,
            world=states.world,
            parameters=states.parameters,
            trained=states.trained,
            accumulation=states.accumulation,
            states_only=True,
        )
        adapters = replace(states, frozen=max(states.frozen, LORA_FROZEN))
        answer = recommend(rows, situation, adapter_rows=_rows(adapters, options) if situation.little_data else ())
    if options.json:
        print_json({"stages": _json_rows(accounts, rows, situation), "recommended": answer_json(answer)})
    else:
        print(states_text(states, accounts, situation, rows))
        if answer is not None:
            print()
            print(sentences(answer))
    write_config(options.write, answer, fresh_base(options), quiet=options.json)
    finish(answer, situation)


def states_of(options: PlanOptions) -> States:
    """The question in numbers. Raises ConfigError."""
    return States(
        parameters=parameter_count(options.params or ""),
        world=options.world,
        precision=precision_of(options),
        optimizer=optimizer_of(options),
        master=not options.no_master,
        frozen=options.frozen,
        accumulation=options.accumulation or 1,
    )


def engine_row(account: StateAccount, gathered: int, micro_batch: int) -> Row:
    """What the engine keeps as a row of a plan: states, and at stage 3 the ``gathered`` bytes of the layer at work."""
    return Row(
        stage=account.stage,
        offload=account.offload,
        checkpointing=False,
        micro_batch=micro_batch,
        **{name: account.engine[name] for name in STATE_CATEGORIES},
        activations=0,
        communication=gathered if account.stage == 3 else 0,
        temporary=0,
        framework=0,
        total=account.engine_total + (gathered if account.stage == 3 else 0),
        host_bytes=account.host_bytes,
        disk_bytes=account.disk_bytes,
        peak_phase="",
        peak_unit="",
        sent_bytes_per_step=account.sent_bytes_per_step,
    )


def states_text(
    states: States, accounts: Sequence[StateAccount], situation: Situation | None, rows: Sequence[Row]
) -> str:
    """The account as a table for people."""
    each = states.per_parameter
    (gb_name, gb), (gib_name, gibi) = common_unit(max(account.total for account in accounts))
    ranks = f"{states.world} rank{'s' if states.world != 1 else ''}"
    head = (
        f"States of {parameters(states.parameters)} parameters on {ranks}, {states.precision}, {states.optimizer}: "
        f"{' + '.join(str(value) for value in each.values())} bytes per trained parameter\n"
        f"(weights, gradients, fp32 masters, moments). Bytes of one rank's device in {gb_name}; activations, gathered "
        f"units and buffers come on top.\n"
    )
    if states.frozen:
        head += f"{states.frozen:.2%} of the parameters are frozen and cost their weights alone.\n"
    columns = ["stage", "offload", "params", "grads", "master", "optimizer", f"total {gb_name}", f"total {gib_name}"]
    columns += [f"engine {gb_name}", f"engine {gib_name}", f"away {gb_name}"]
    columns += ["fits"] if situation else []
    lines = []
    for account, row in zip(accounts, rows, strict=True):
        parts = (account.params, account.grads, account.master, account.optimizer)
        line = [str(account.stage), account.offload, *(in_unit(part, gb) for part in parts)]
        line += [in_unit(total, size) for total in (account.total, account.engine_total) for size in (gb, gibi)]
        line += [in_unit(account.host_bytes + account.disk_bytes, gb)]
        line += ["yes" if fits(row, situation) else "no"] if situation else []
        lines.append(line)
    return f"{head}\n{aligned(columns, lines)}\n\n{_footnote(states)}"


def _footnote(states: States) -> str:
    lines = [
        "engine: what shardledger keeps. Gradients are summed in fp32; stage 3 casts fp32 masters while it gathers and "
        "keeps no 16-bit shard.",
        "away: of one rank, in host memory (cpu) or on disk (nvme).",
        f"To fit, stage 3 also needs room for one gathered layer and its gradient, about {gib(gathered_bytes(states))} in "
        "a GPT of this size.",
    ]
    if not states.master:
        lines.append("--no-master changes the account alone: the engine always trains fp32 masters.")
    return "\n".join(lines)


def _rows(states: States, options: PlanOptions) -> list[Row]:
    gathered, framework = gathered_bytes(states), framework_of(options) or 0
    rows = [engine_row(account, gathered, options.micro_batch or 1) for account in state_accounts(states)]
    return [replace(row, framework=framework, total=row.total + framework) for row in rows]


def _json_rows(
    accounts: Sequence[StateAccount], rows: Sequence[Row], situation: Situation | None
) -> list[dict[str, Any]]:
    """Rows in the plan's keys; what is not counted is null, ``total`` is the article's, ``engine_total`` the engine's."""
    unknown = dict.fromkeys(("checkpointing", "activations", "communication", "temporary", "framework", "peak_phase"))
    return [
        {
            **row_json(row, situation),
            **unknown,
            **{name: getattr(account, name) for name in STATE_CATEGORIES},
            "total": account.total,
            "engine_total": account.engine_total,
            "host_bytes": account.host_bytes,
            "disk_bytes": account.disk_bytes,
        }
        for account, row in zip(accounts, rows, strict=True)
    ]
