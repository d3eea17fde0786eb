"""The plan of a whole model: rows of the dry run as a table, the recommendation, pictures and a config file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardledger.cli.plan_options import Hardware, PlanOptions, framework_of, optimizer_of, situation_of
from shardledger.cli.plan_output import aligned, as_json, finish, print_json, sentences
from shardledger.cli.plan_plot import check_plot, print_bars, write_plot
from shardledger.cli.plan_question import ADAPTERS, DEFAULT_SEQ_LEN, Planned, Planner, Question
from shardledger.cli.plan_verify import check_room, print_verification, ranks_for
from shardledger.cli.plan_write import Base, fresh_base, write_config
from shardledger.errors import ConfigError, DoesNotFitError
from shardledger.ledger.amounts import common_unit, gib, in_unit, parameters
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.choose import cheapest, choice
from shardledger.ledger.fit import Situation, fits, moved_by
from shardledger.ledger.plot import Moment, picture
from shardledger.ledger.recommend import Recommendation, recommend
from shardledger.ledger.row import Row
from shardledger.ledger.traffic import step_time

if TYPE_CHECKING:
    from shardledger.config import Config


def plan_model(options: PlanOptions, hardware: Hardware, planner: Planner) -> None:
    """Print the plan, recommend, draw, write.

    Raises:
        ConfigError: wrong options, config or model.
        DoesNotFitError: no choice fits.
    """
    if options.plot is not None:
        check_plot(options.plot)
    question = question_of(options)
    planned = planner(question)
    situation = model_situation(question, planned, options, hardware)
    adapters = None
    if situation.little_data and question.trainable == "all" and hardware.memory_budget is None:
        adapters = planner(replace(question, trainable=ADAPTERS))
    if hardware.memory_budget is not None:
        rows, answer = within_budget(planned, hardware.memory_budget, situation)
    else:
        rows, answer = settle(question, planned, adapters, situation, planner)
    timeline, where = timeline_of(planned, answer)
    if options.json:
        print_json(as_json(rows, answer, situation))
    else:
        print(heading(question, planned, situation))
        print()
        print(table(rows, situation))
        print()
        for note in planned.notes:
            print(f"note: {note}\n")
        print_bars(_worth_drawing(rows, answer, question), situation.device_memory, timeline, where=where)
        print()
        print(sentences(answer))
    if options.plot is not None:
        drawn = picture(rows, situation.device_memory, timeline, heading(question, planned, situation), where)
        write_plot(options.plot, drawn)
    base = Base(content=question.written, micro_batch=question.micro_batch, accumulation=question.accumulation)
    write_config(options.write, answer, base, quiet=options.json)
    if options.verify and answer.row is not None:
        check_room(planned.parameters, ranks_for(options))
        print_verification(options, question, answer.row, quiet=options.json)
    finish(answer, situation)


def question_of(options: PlanOptions) -> Question:
    """Config, batch and model of the options, checked; the command line's batch replaces the config's.

    Raises:
        ConfigError: with every problem of the config.
    """
    from shardledger.config import load_config
    from shardledger.config.source import read_source
    from shardledger.workload.adapters import adapter_rank

    if options.trainable is not None:
        adapter_rank(options.trainable)
    fresh = fresh_base(options).content
    written = fresh if options.config is None else read_source(options.config)[0]
    config = load_config(options.config or fresh, world=options.world, world_source="--world")
    if options.config is not None:
        check_against(options, config)
    return Question(
        model=options.model or "",
        world=options.world,
        config={"optimizer": fresh["optimizer"], **config.to_dict()},
        written={"optimizer": fresh["optimizer"], **written},
        micro_batch=options.micro_batch or config.train_micro_batch_size_per_gpu,
        seq_len=options.seq_len or DEFAULT_SEQ_LEN,
        accumulation=options.accumulation or config.gradient_accumulation_steps,
        device=options.device.lower(),
        framework_bytes=0 if options.memory_budget is not None and options.framework is None else framework_of(options),
        trainable=options.trainable or "all",
    )


def check_against(options: PlanOptions, config: Config) -> None:
    """Refuse options that contradict the configuration. Raises ConfigError with both values of each."""
    config.conflicts_with(precision=options.precision, source="--precision")
    if options.optimizer is None or config.optimizer is None:
        return
    there, arguments = config.optimizer.resolved()
    momentum = "-momentum" if there == "SGD" and arguments.get("momentum") else ""
    if optimizer_of(options) != there.lower() + momentum:
        raise ConfigError(
            f"optimizer.type is {config.optimizer.type} in {options.config} but --optimizer says {options.optimizer}; "
            f"change one of them"
        )


def model_situation(question: Question, planned: Planned, options: PlanOptions, hardware: Hardware) -> Situation:
    """What the plan must fit into. Raises ConfigError without device memory."""
    memory = hardware.memory_budget or hardware.device_memory
    if memory is None:
        raise ConfigError("--model needs --device-memory, as in --device-memory 80GiB, or --memory-budget")
    return situation_of(
        options,
        hardware,
        memory,
        world=question.world,
        parameters=planned.parameters,
        trained=planned.trained,
        tokens=question.micro_batch * question.seq_len * question.accumulation,
        accumulation=question.accumulation,
    )


def settle(
    question: Question, planned: Planned, adapters: Planned | None, situation: Situation, planner: Planner
) -> tuple[list[Row], Recommendation]:
    """Recommend, planning once more with each smaller micro-batch that would be recommended, until it is exact."""
    rows = list(planned.rows)
    adapter_rows = list(adapters.rows) if adapters is not None else []
    while True:
        answer = recommend(rows, situation, adapter_rows=adapter_rows)
        if answer.row is None or not answer.estimated:
            return [*adapter_rows, *rows] if answer.adapters else rows, answer
        smaller = replace(
            question,
            micro_batch=answer.row.micro_batch,
            accumulation=question.accumulation * (question.micro_batch // answer.row.micro_batch),
            trainable=ADAPTERS if answer.adapters else question.trainable,
        )
        (adapter_rows if answer.adapters else rows).extend(planner(smaller).rows)


def within_budget(planned: Planned, budget: int, situation: Situation) -> tuple[list[Row], Recommendation]:
    """What ``"stage": "auto"`` chooses under this budget, as a recommendation; its row joins the others."""
    rows = list(planned.rows)
    host = None if situation.host_memory is None else situation.host_memory // situation.here
    possible = [row for row in rows if "nvme" not in row.offload and (host is None or row.host_bytes <= host)]
    try:
        row = cheapest(possible, budget) if planned.within is None else planned.within(budget, host)
    except DoesNotFitError as error:
        missing = min(row.total for row in possible) - budget
        return rows, Recommendation(row=None, reasons=(str(error),), missing_bytes=missing)
    mixed = bool(row.unit_stages or row.recomputed_units)
    return [*rows, row] if mixed else rows, Recommendation(row=row, reasons=(choice(row, rows, budget),))


def heading(question: Question, planned: Planned, situation: Situation) -> str:
    """One line that says what was planned."""
    trained = "" if planned.trained == planned.parameters else f" ({parameters(planned.trained)} trained)"
    return (
        f"{question.model}, {parameters(planned.parameters)} parameters{trained}, {question.world} ranks, micro-batch "
        f"{question.micro_batch} x {question.seq_len} tokens, accumulation {question.accumulation}, "
        f"{gib(situation.device_memory)} per device"
    )


def table(rows: Sequence[Row], situation: Situation) -> str:
    """One line a row: bytes by category at the peak, where the peak is, whether it fits, what travels and how long."""
    _, (unit, size) = common_unit(max(row.total for row in rows))
    short = dict(zip(CATEGORIES, ("params", "grads", "master", "optim", "activ", "comm", "temp", "frame"), strict=True))
    several = len({row.micro_batch for row in rows}) > 1
    columns = ["stage", "offload", *(["batch"] if several else []), "recomp", *short.values()]
    columns += [f"peak {unit}", "fits", f"free {unit}", f"sent {unit}", f"host {unit}", f"disk {unit}", f"moved {unit}"]
    columns += ["step s", "hidden"] if situation.speed else []
    columns += ["peak in"]
    lines = []
    for row in rows:
        some = "some" if row.recomputed_units else "yes"
        line = [stage_of(row), row.offload, *([str(row.micro_batch)] if several else [])]
        line += [some if row.checkpointing else "no", *(in_unit(getattr(row, name), size) for name in CATEGORIES)]
        line += [in_unit(row.total, size), "yes" if fits(row, situation) else "NO"]
        line += [in_unit(situation.device_memory - row.total, size), in_unit(row.sent_bytes_per_step, size)]
        line += [in_unit(row.host_bytes, size), in_unit(row.disk_bytes, size)]
        line += [in_unit(row.link_bytes_per_step + row.disk_bytes_per_step, size)]
        if situation.speed and situation.tokens:
            recompute = row.checkpointing
            moved = moved_by(row, situation)
            time = step_time(moved, situation.parameters, situation.tokens, situation.speed, recompute=recompute)
            line += [f"{time.bound_s:.3g}", "yes" if time.hidden else f"from {time.tokens_to_hide:,} tokens"]
        line += [f"{row.peak_phase} {row.peak_unit}".strip()]
        lines.append(line)
    text = aligned(columns, lines)
    if any(row.offload != "none" for row in rows):
        text += "\nmoved: between device, host memory and disk in one step, by one rank."
    if situation.speed:
        text += (
            "\nstep s: no step is shorter (computing, or bytes over a link, whichever takes longest, then the optimizer's "
            "disk); hidden: whether computing covers the bytes sent."
        )
    return text


def timeline_of(planned: Planned, answer: Recommendation) -> tuple[Sequence[Moment], str]:
    """One step at the recommended stage, and a word on which; of the first row where nothing is recommended."""
    row = answer.row
    found = None if row is None else planned.timelines.get((row.stage, row.checkpointing))
    if row is None or found is None:
        return planned.timeline, ""
    return found, f" at stage {row.stage}{', recomputed' if row.checkpointing else ''}"


def stage_of(row: Row) -> str:
    """``3``, or ``3/2`` where some units are at a lower stage."""
    return "/".join([str(row.stage), *sorted({str(stage) for _, stage in row.unit_stages}, reverse=True)])


def _worth_drawing(rows: Sequence[Row], answer: Recommendation, question: Question) -> list[Row]:
    """For the terminal: what keeps everything on the device, and what is recommended."""
    drawn = [row for row in rows if row.offload == "none" and row.micro_batch == question.micro_batch]
    if answer.row is not None and answer.row not in drawn:
        drawn.append(answer.row)
    return drawn or list(rows)
