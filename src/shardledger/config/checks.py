"""What can only be judged on the typed configuration: contradictions, what is not available, what has no effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from shardledger.config.findings import Findings, join, shown
from shardledger.config.model import Config
from shardledger.config.section import Section, hints

_NOT_YET = "is not available yet"


def check(config: Config, unread: Collection[str], findings: Findings) -> None:
    """Report contradictions and refusals; ``unread`` are top-level keys whose values were wrong and are not in it."""
    if not {"bf16", "fp16", "data_types"} & set(unread):
        _check_precision(config, findings)
    _check_offload(config, findings)
    _check_budget(config, findings)
    for path, on, cure in _switches(config):
        if on:
            findings.problem(f"{findings.written(path)} {cure}")
    findings.no_effect += (f"{findings.written(path)}: {reason}" for path, reason in _idle_fields(config, config, ""))
    told = any(line.startswith("gradient_clipping") for line in findings.resolutions)
    if not told and "gradient_clipping" not in findings.stated:
        findings.resolutions.append("gradient_clipping = 0.0 (not given: off; DeepSpeed 0.19 would clip at 1.0)")


def _check_precision(config: Config, findings: Findings) -> None:
    bf16 = findings.written("bf16.enabled")
    if config.fp16.enabled and config.bf16.enabled:
        findings.problem(f"fp16.enabled and {bf16} are both true; a run has one precision, so switch fp16 off")
        return
    if config.torch_autocast.enabled and config.precision != "fp32":
        findings.problem(
            f"torch_autocast.enabled and {config.precision}.enabled are both true; autocast keeps fp32 weights, "
            f"{config.precision} does not, so switch one off"
        )
    wanted = config.data_types.param_dtype
    if wanted is not None and wanted != config.precision:
        reason = f"{bf16} is {shown(config.bf16.enabled)} and fp16.enabled is {shown(config.fp16.enabled)}"
        findings.problem(
            f"data_types.param_dtype is {wanted}, but {reason}, which make the run {config.precision}; remove "
            f"param_dtype, or change bf16.enabled"
        )


def _check_offload(config: Config, findings: Findings) -> None:
    zero = config.zero_optimization
    homes = {}
    for name in ("offload_optimizer", "offload_param"):
        section = getattr(zero, name)
        path = f"zero_optimization.{name}"
        homes[name] = "none" if section is None else section.device
        if section is None:
            continue
        if section.device == "none":
            findings.no_effect.append(f"{path}: device is none, so nothing is offloaded")
        elif section.device == "nvme" and not section.nvme_path:
            findings.problem(
                f"{path}.device is nvme, and nvme_path is missing: name an existing folder on a fast local disk"
            )
    if "sub_group_size" in zero.model_fields_set and homes["offload_optimizer"] == "none":
        findings.no_effect.append(
            "zero_optimization.sub_group_size: it is read with offload_optimizer; on the device the optimizer steps at once"
        )
    if homes["offload_param"] != "none" and zero.stage < 3 and "zero_optimization.stage" not in findings.auto:
        findings.problem(
            f"{findings.written('zero_optimization.offload_param')} needs stage 3, and the stage is {zero.stage}: there every "
            f"rank computes with whole parameters all the time; use stage 3, or remove it"
        )
    if homes["offload_param"] == "nvme" and homes["offload_optimizer"] == "cpu":
        findings.problem(
            "zero_optimization.offload_param is on nvme and offload_optimizer on cpu: the masters in host memory are the "
            "larger copy of the same weights; put both on nvme, or parameters on cpu"
        )


def _check_budget(config: Config, findings: Findings) -> None:
    is_open = "zero_optimization.stage" in findings.auto
    budget = config.shardledger.memory_budget
    own, stage = config.shardledger, config.zero_optimization.stage
    if own.recomputed_units and not own.activation_checkpointing:
        findings.problem(
            "shardledger.recomputed_units names units, and shardledger.activation_checkpointing is false; set it to true, "
            "or remove the list"
        )
    if is_open and (own.unit_stages or own.recomputed_units):
        findings.problem(
            'shardledger.unit_stages and recomputed_units are what the budget chooses when the stage is "auto"; remove them'
        )
    higher = sorted(path for path, chosen in (own.unit_stages or {}).items() if chosen > stage)
    if higher and not is_open:
        findings.problem(
            f"shardledger.unit_stages: {higher[0]!r} has a higher stage than zero_optimization.stage = {stage}; write the "
            f"highest one there, and lower ones here"
        )
    if is_open and budget is None:
        findings.problem(
            f'{findings.written("zero_optimization.stage")} is "auto", and there is no budget to choose it by; add '
            f'"shardledger": {{"memory_budget": "22GiB"}}, or write 0, 1, 2 or 3'
        )
    if budget is not None and not is_open:
        findings.no_effect.append(
            'shardledger.memory_budget: it is read when zero_optimization.stage is "auto"; '
            "shardledger.device_memory checks a stage that was chosen"
        )


def _switches(config: Config) -> Iterator[tuple[str, bool, str]]:
    """Yield (key path, is it asked for, what is wrong and what to do) for values that are not available."""
    bf16 = config.bf16
    yield (
        "activation_checkpointing.cpu_checkpointing",
        config.activation_checkpointing.cpu_checkpointing,
        f"= true {_NOT_YET}; set shardledger.activation_checkpointing to true to recompute instead",
    )
    zero = config.zero_optimization
    yield (
        "zero_optimization.offload_optimizer.super_offload",
        zero.offload_optimizer is not None and zero.offload_optimizer.super_offload,
        f"= true {_NOT_YET}; remove the key: the optimizer's step overlaps with transfers in any case",
    )
    fp32 = "= true is not available, because masters and moments are fp32; remove the key"
    yield "bf16.bf16_master_weights_and_grads", bf16.bf16_master_weights_and_grads, fp32
    yield "bf16.bf16_optimizer_states", bf16.bf16_optimizer_states, fp32
    yield "fp16.fp16_master_weights_and_grads", config.fp16.fp16_master_weights_and_grads, fp32


def _idle_fields(config: Config, section: Section, path: str) -> Iterator[tuple[str, str]]:
    """Yield (key path, reason) of every given field that changes nothing in this configuration."""
    for name, field in type(section).model_fields.items():
        value, here = getattr(section, name), join(path, name)
        if isinstance(value, Section):
            yield from _idle_fields(config, value, here)
        if name not in section.model_fields_set or value is None:
            continue
        reason = hints(field).get("no_effect")
        lowest = hints(field).get("from_stage", 0)
        off = hints(field).get("when_off")
        if reason:
            yield here, reason
        elif off and not getattr(section, "enabled", True):
            yield here, off
        elif "when_device" in hints(field) and getattr(section, "device", "none") not in (
            "none",
            hints(field)["when_device"],
        ):
            yield here, f"it is read when device is {hints(field)['when_device']}"
        elif config.zero_optimization.stage < lowest:
            yield here, f"only stage {lowest} reads it, and the stage is {config.zero_optimization.stage}"
