"""Checks of ``optimizer.params`` and ``scheduler.params`` against the arguments their type accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from shardledger.config import optimizer, scheduler
from shardledger.config.findings import Findings, join, shown
from shardledger.config.optimizer import OptimizerSection
from shardledger.config.scheduler import SCHEDULES, TORCH_NAMES
from shardledger.config.suggest import explain_unknown
from shardledger.config.values import AUTO, KINDS

_AutoRule = Callable[[str, str], Any]
"""(key, path) -> the value "auto" stands for, or None to leave the key out."""


def check_optimizer(section: dict[str, Any] | None, findings: Findings) -> dict[str, Any] | None:
    """Return the ``optimizer`` section with its arguments checked and converted; problems go to ``findings``."""
    if section is None or not _readable(section):
        return section
    kind, raw = section["type"], section.get("params") or {}
    names = [name for name in optimizer.TORCH_PARAMS if name.lower() not in optimizer.DEEPSPEED_NAMES]
    if _refused(kind, "optimizer", optimizer.REFUSED_TYPES, names, findings):
        return section
    draft = OptimizerSection.model_construct(type=kind, params={})

    def auto(key: str, path: str) -> Any:
        if key == "lr" or draft.kinds() is None:
            findings.problem(f'{path} is "auto", and no trainer fills it here; write a value')
        else:
            findings.resolutions.append(f"{path}: auto, left to the default of {kind}")
        return None

    params = _check(raw, "optimizer.params", draft.kinds(), auto, findings)
    _check_adam_switches(params, draft, findings)
    checked = OptimizerSection.model_construct(type=kind, params=params)
    if checked.lacks_weight_decay() and checked.torch_class() == "AdamW":
        findings.resolutions.append(
            "optimizer.params.weight_decay = 0.0 (not given: the default of DeepSpeed's Adam; torch's AdamW has 0.01)"
        )
    return {"type": kind, "params": params}


def _check_adam_switches(params: Mapping[str, Any], draft: OptimizerSection, findings: Findings) -> None:
    if draft.type.lower() not in ("adam", "adamw"):
        return
    always = {
        "bias_correction": "Adam always corrects its bias here",
        "fp32_optimizer_states": "moments are always fp32",
    }
    for key, reason in always.items():
        path = f"optimizer.params.{key}"
        if params.get(key) is False:
            findings.problem(f"{path} = false: {reason}; remove the key.")
        elif key in params:
            findings.no_effect.append(f"{path}: {reason}")
    if "set_grad_none" in params:
        findings.no_effect.append("optimizer.params.set_grad_none: gradients are released by the engine")


def check_scheduler(
    section: dict[str, Any] | None, optimizer_section: Mapping[str, Any] | None, findings: Findings
) -> dict[str, Any] | None:
    """Return the ``scheduler`` section, checked likewise; ``warmup_max_lr: "auto"`` becomes the optimizer's lr."""
    if section is None or not _readable(section):
        return section
    kind, raw = section["type"], section.get("params") or {}
    if _refused(kind, "scheduler", scheduler.REFUSED_TYPES, (*SCHEDULES, *TORCH_NAMES), findings):
        return section
    declared = SCHEDULES.get(kind)
    optimizer_params = (optimizer_section or {}).get("params")
    lr = optimizer_params.get("lr") if isinstance(optimizer_params, Mapping) else None

    def auto(key: str, path: str) -> Any:
        if key == "warmup_max_lr" and lr is not None:
            findings.resolutions.append(f"{path} = {shown(lr)} (auto: optimizer.params.lr)")
            return lr
        if key == "warmup_max_lr":
            findings.resolutions.append(f"{path}: auto, the learning rate of each parameter group")
        elif declared is not None and not key.endswith("num_steps"):
            findings.resolutions.append(f"{path} = {shown(declared[key][1])} (auto: the default)")
            return declared[key][1]
        else:
            findings.problem(f'{path} is "auto", and no trainer fills it here; write a value')
        return None

    kinds = None if declared is None else {key: kind for key, (kind, _) in declared.items()}
    params = _check(raw, "scheduler.params", kinds, auto, findings)
    if raw.get("warmup_max_lr") == AUTO and "warmup_max_lr" not in params and declared and "warmup_max_lr" in declared:
        # Stated as None, because leaving it out would mean the schedule's own default.
        params["warmup_max_lr"] = None
    for key, (_, default) in (declared or {}).items():
        if default is ... and key not in raw:
            findings.problem(f"scheduler.params.{key} is missing; {kind} needs it (optimizer steps of the whole run)")
    _warn_of_short_run(params, findings)
    return {"type": kind, "params": params}


def _warn_of_short_run(params: Mapping[str, Any], findings: Findings) -> None:
    total, warmup = params.get("total_num_steps"), params.get("warmup_num_steps", 1000)
    if isinstance(total, int) and isinstance(warmup, int) and total < warmup:
        findings.warnings.append(
            f"scheduler.params.total_num_steps = {total} is less than warmup_num_steps = {warmup}, "
            "so the run ends in warm-up."
        )


def _readable(section: Mapping[str, Any]) -> bool:
    """Tell whether type and params have the right shape; if not, the section model reports it."""
    return isinstance(section.get("type"), str) and isinstance(section.get("params", {}), (Mapping, type(None)))


def _refused(kind: str, section: str, refused: Mapping[str, str], names: Iterable[str], findings: Findings) -> bool:
    """Report a type that is refused by name, or that is a known name in the wrong case."""
    if kind.lower() in refused:
        findings.problem(f"{section}.type = {shown(kind)}: {refused[kind.lower()]}")
        return True
    for name in names:
        if name.lower() == kind.lower() and name != kind:
            findings.problem(f"{section}.type = {shown(kind)}: did you mean {shown(name)}?")
            return True
    return False


def _check(
    raw: Mapping[str, Any], path: str, kinds: Mapping[str, str] | None, auto: _AutoRule, findings: Findings
) -> dict[str, Any]:
    """Return the known arguments with their values converted; ``kinds`` None leaves names and values to the runtime."""
    checked: dict[str, Any] = {}
    for key, value in raw.items():
        here = join(path, str(key))
        if kinds is not None and key not in kinds:
            findings.unknown(explain_unknown(path, str(key), kinds))
        elif value == AUTO and isinstance(value, str):
            resolved = auto(key, here)
            if resolved is not None:
                checked[key] = resolved
        elif kinds is None:
            checked[key] = value
        else:
            try:
                converted = KINDS[kinds[key]].validate_python(value)
            except ValidationError as error:
                findings.invalid(here, error)
                continue
            checked[key] = list(converted) if isinstance(converted, tuple) else converted
    return checked
