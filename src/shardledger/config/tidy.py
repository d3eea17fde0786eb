"""From raw keys to the keys the sections declare: second names, outdated names, "auto", keys without effect, strangers.

Nothing is raised here; what is wrong or worth telling goes into ``Findings``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from shardledger.config.findings import Findings, join, shown
from shardledger.config.known_keys import ALIASES, DEPRECATED, RULES, Rule
from shardledger.config.section import Section, hints, section_of
from shardledger.config.suggest import explain_unknown
from shardledger.config.values import AUTO, KINDS

_ABSENT = object()


def tidy(model: type[Section], path: str, raw: Mapping[str, Any], findings: Findings) -> dict[str, Any]:
    """Return the keys of ``raw`` that ``model`` declares, under their canonical names, "auto" resolved or left out.

    ``path`` is the key path of the section, "" for the whole file.
    """
    tidied: dict[str, Any] = {}
    for key, (written, value) in _canonical(path, raw, findings).items():
        field = model.model_fields.get(key)
        rule = RULES.get(path, {}).get(key)
        if field is not None:
            kept = _field(field, join(path, key), value, findings)
            if kept is not _ABSENT:
                tidied[key] = kept
        elif rule is not None:
            _apply(rule, join(path, written), value, findings)
        else:
            findings.unknown(explain_unknown(path, written))
    return tidied


def _canonical(path: str, raw: Mapping[str, Any], findings: Findings) -> dict[str, tuple[str, Any]]:
    """Map canonical names to (name as written, value), and refuse a key given under two of its names."""
    found: dict[str, tuple[str, Any]] = {}
    for written, value in raw.items():
        written = str(written)
        key = ALIASES.get(path, {}).get(written, written)
        if written in DEPRECATED.get(path, {}):
            key = DEPRECATED[path][written]
            findings.warnings.append(f"{join(path, written)} is outdated; write {join(path, key)}.")
            value = _modern(path, written, value, findings)
            if value is None:
                continue
        if key in found:
            findings.problem(
                f"{join(path, found[key][0])} and {join(path, written)} are two names of one key; keep one of them"
            )
            continue
        found[key] = (written, value)
        if written != key:
            findings.spelling[join(path, key)] = join(path, written)
    return found


def _modern(path: str, written: str, value: Any, findings: Findings) -> Any:
    """Return the value an outdated key stands for under its new name; None when it asks for nothing."""
    if written == "cpu_offload_use_pin_memory":
        findings.no_effect.append(f"{join(path, written)}: write offload_optimizer.pin_memory")
        return None
    if not written.startswith("cpu_offload"):
        return value
    _check_kind("bool", join(path, written), value, findings)
    return {"device": "cpu"} if _is_on(value) else None


def _field(field: FieldInfo, path: str, value: Any, findings: Findings) -> Any:
    section = section_of(field)
    auto = hints(field).get("auto")
    if value is None and (section is not None or auto == "batch" or type(None) in get_args(field.annotation)):
        return _ABSENT
    if value == AUTO and isinstance(value, str):
        return _resolve_auto(field, path, auto, findings)
    if section is None:
        findings.stated.add(path)
        return value
    if path == "zero_optimization" and isinstance(value, bool):
        findings.warnings.append(f'{path}: {shown(value)} is outdated; write {{"stage": {int(value)}}}.')
        value = {"stage": int(value)}
    if not isinstance(value, Mapping):
        written = findings.written(path)
        findings.problem(f"{written} = {shown(value)}: an object {{...}} is needed ({field.description})")
        return _ABSENT
    return tidy(section, path, value, findings)


def _resolve_auto(field: FieldInfo, path: str, policy: str | None, findings: Findings) -> Any:
    written = findings.written(path)
    findings.auto.add(path)
    if policy == "budget":
        findings.resolutions.append(f"{written}: auto, decided by shardledger.memory_budget when the model is known")
    elif policy == "refuse":
        findings.problem(f'{written} is "auto", and nothing here can fill it; write a value ({field.description})')
    elif policy == "plan":
        findings.resolutions.append(f"{written}: auto, left to the plan, which takes it from the model")
    elif policy == "ranks":
        findings.resolutions.append(f"{written}: auto, agreed by the ranks when they meet")
    elif section_of(field) is not None:
        findings.resolutions.append(f"{written}: auto, the defaults of the section are used")
    elif policy != "batch":
        default = shown(field.default)
        findings.resolutions.append(f"{written} = {default} (auto: no trainer fills it here, so this is the default)")
    return _ABSENT


def _apply(rule: Rule, path: str, value: Any, findings: Findings) -> None:
    """Accept, or refuse, a key that the engine does not read."""
    before = len(findings.problems)
    if rule.kind == "section":
        asks_for_something = _section_asks(rule, path, value, findings)
    else:
        asks_for_something = value is not None and value not in (*rule.harmless, AUTO)
        if asks_for_something and not rule.refused:
            _check_kind(rule.kind, path, value, findings)
    if rule.refused and asks_for_something:
        findings.problem(f"{path} = {shown(value)}: {rule.reason}")
    if len(findings.problems) == before:
        reason = rule.reason if not rule.refused else "it asks for nothing that is not the case here"
        findings.no_effect.append(f"{path}: {reason}")
        findings.keep_inert(path, value)


def _section_asks(rule: Rule, path: str, value: Any, findings: Findings) -> bool:
    """Check the keys of a section the engine does not read; tell whether it is switched on."""
    if value is None or value == AUTO or isinstance(value, bool):
        return bool(value is True)
    if not isinstance(value, Mapping):
        findings.problem(f"{path} = {shown(value)}: an object {{...}} is needed")
        return False
    for key, child in value.items():
        here = join(path, str(key))
        if rule.keys is not None and key not in rule.keys:
            findings.unknown(explain_unknown(path, str(key)))
        elif rule.keys is not None and child is not None and child != AUTO:
            _check_kind(rule.keys[key], here, child, findings)
    return _is_on(value.get(rule.switch)) if rule.switch else bool(value)


def _check_kind(kind: str, path: str, value: Any, findings: Findings) -> None:
    try:
        KINDS[kind].validate_python(value)
    except ValidationError as error:
        findings.invalid(path, error)


def _is_on(value: Any) -> bool:
    """Tell whether a switch is on; null, "auto" and what is no boolean at all are off."""
    try:
        return value is not None and bool(KINDS["bool"].validate_python(value))
    except ValidationError:
        return False
