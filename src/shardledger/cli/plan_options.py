"""The options of ``shardledger plan``, read and checked. Nothing here imports torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shardledger.config.quantities import bandwidth, byte_size, element_count, flop_rate
from shardledger.errors import ConfigError
from shardledger.ledger.account import OPTIMIZER_BYTES, PRECISION_BYTES
from shardledger.ledger.fit import Situation

T = TypeVar("T")
DEFAULT_RANKS_PER_MACHINE = 8


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command line as it was typed; None where an option was not given."""

    params: str | None = None
    model: str | None = None
    world: int = 1
    precision: str | None = None
    """None: the configuration's, or bf16 without one."""
    optimizer: str | None = None
    """None: the configuration's, or AdamW."""
    no_master: bool = False
    frozen: float = 0.0
    device_memory: str | None = None
    host_memory: str | None = None
    per_machine: int | None = None
    framework: str | None = None
    device: str = "cuda"
    micro_batch: int | None = None
    seq_len: int | None = None
    accumulation: int | None = None
    config: str | None = None
    trainable: str | None = None
    task_samples: int | None = None
    bandwidth: str | None = None
    flops: str | None = None
    link: str | None = None
    disk: str | None = None
    nvme_path: str | None = None
    measure: bool = False
    verify: bool = False
    memory_budget: str | None = None
    write: str | None = None
    plot: str | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the options say about machines, in numbers."""

    device_memory: int | None
    memory_budget: int | None
    host_memory: int | None
    ranks_per_machine: int
    bandwidth: float | None
    flops: float | None
    link: float | None = None
    """Bytes per second between a device and host memory."""
    disk: float | None = None
    """Bytes per second of the disk."""


def hardware_of(options: PlanOptions) -> Hardware:
    """Read every amount. Raises ConfigError that names the option."""
    return Hardware(
        device_memory=read("--device-memory", options.device_memory, byte_size),
        memory_budget=read("--memory-budget", options.memory_budget, byte_size),
        host_memory=read("--host-memory", options.host_memory, byte_size),
        ranks_per_machine=options.per_machine or min(options.world, DEFAULT_RANKS_PER_MACHINE),
        bandwidth=read("--bandwidth", options.bandwidth, bandwidth),
        flops=read("--flops", options.flops, flop_rate),
        link=read("--link", options.link, bandwidth),
        disk=read("--disk", options.disk, bandwidth),
    )


def situation_of(options: PlanOptions, hardware: Hardware, device_memory: int, **facts: Any) -> Situation:
    """What a plan must fit into: the machines, and the ``facts`` of the model (fields of ``Situation``)."""
    return Situation(
        device_memory=device_memory,
        host_memory=hardware.host_memory,
        ranks_per_machine=hardware.ranks_per_machine,
        bandwidth=hardware.bandwidth,
        flops=hardware.flops,
        link=hardware.link,
        disk=hardware.disk,
        task_samples=options.task_samples,
        **facts,
    )


def framework_of(options: PlanOptions) -> int | None:
    """Bytes on the device before the model; None where the option was not given. Raises ConfigError."""
    if options.framework is not None and options.framework.strip() == "0":
        return 0
    return read("--framework", options.framework, byte_size)


def read(option: str, text: str | None, parse: Callable[[object], T]) -> T | None:
    """Parse one option's text. Raises ConfigError that names it."""
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None


def parameter_count(text: str) -> int:
    """``--params`` as a number. Raises ConfigError."""
    found = read("--params", text, element_count)
    assert found is not None
    return found


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """``value`` in lower case. Raises ConfigError that names the nearest allowed one."""
    lowered = value.lower()
    if lowered in allowed:
        return lowered
    near = difflib.get_close_matches(lowered, allowed, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"it is one of {', '.join(allowed)}"
    raise ConfigError(f"{option} {value!r} is not known here; {hint}")


def _budget_above(budget: str, device: str) -> list[str]:
    try:
        if byte_size(budget) <= byte_size(device):
            return []
    except ValueError:  # told where the options are read
        return []
    return [f"--memory-budget {budget} is more than --device-memory {device}: the peak could not stay under both"]


def precision_of(options: PlanOptions) -> str:
    """``--precision``, or bf16. Raises ConfigError."""
    return one_of("--precision", options.precision or "bf16", tuple(PRECISION_BYTES))


def optimizer_of(options: PlanOptions) -> str:
    """``--optimizer``, or AdamW. Raises ConfigError."""
    return one_of("--optimizer", options.optimizer or "adamw", tuple(OPTIMIZER_BYTES))


def check_options(options: PlanOptions) -> None:
    """Refuse what contradicts itself. Raises ConfigError with every problem."""
    problems = []
    if options.params is not None and options.model is not None:
        problems.append("--params and --model exclude each other: --params counts states only, --model plans all of it")
    if options.params is None and options.model is None and not options.measure:
        problems.append(
            "plan needs a model: --params 7.5e9 for the account of states, or --model gpt:25m for the whole plan "
            "(--measure alone measures this machine)"
        )
    if options.params is not None:
        for name in ("config", "trainable", "plot", "seq_len", "memory_budget"):
            if getattr(options, name) is not None:
                problems.append(f"--{name.replace('_', '-')} needs --model: --params counts states only")
        if options.verify:
            problems.append("--verify needs --model: --params counts states only")
    if options.model is not None and options.device_memory is None and options.memory_budget is None:
        problems.append("--model needs --device-memory, as in --device-memory 80GiB")
    if not 0 <= options.frozen <= 1:
        problems.append(f"--frozen {options.frozen:g} is not a share between 0 and 1 (0.99 freezes 99 %)")
    if options.model is not None and options.frozen:
        problems.append("--frozen goes with --params; with --model the model's own requires_grad decides")
    if options.model is not None and options.no_master:
        problems.append(
            "--no-master goes with --params: what the engine keeps for --model has masters in 16-bit training"
        )
    if options.flops is not None and options.bandwidth is None and not options.measure:
        problems.append("--flops needs --bandwidth, as in --bandwidth 50GB/s: a step computes and sends")
    if options.device_memory is not None and options.memory_budget is not None:
        problems += _budget_above(options.memory_budget, options.device_memory)
    if options.write is not None and options.device_memory is None and options.memory_budget is None:
        problems.append("--write needs --device-memory: without it there is nothing to recommend")
    for name in ("write", "plot"):
        target = getattr(options, name)
        if target is not None and not Path(target).resolve().parent.is_dir():
            problems.append(f"--{name} {target}: there is no folder {Path(target).parent}")
    for check in (
        lambda: one_of("--device", options.device, ("cuda", "cpu")),
        lambda: precision_of(options),
        lambda: optimizer_of(options),
    ):
        try:
            check()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
