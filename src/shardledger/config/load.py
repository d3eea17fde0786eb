"""``load_config``: from a file, a dict or a text to one checked, frozen ``Config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from shardledger.config.batch import resolve_batch
from shardledger.config.checks import check
from shardledger.config.findings import Findings
from shardledger.config.model import Config, with_notes
from shardledger.config.params import check_optimizer, check_scheduler
from shardledger.config.section import Section, section_of
from shardledger.config.source import read_source
from shardledger.config.tidy import tidy
from shardledger.config.values import KINDS


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    world: int = 1,
    world_source: str = "WORLD_SIZE",
    lenient: bool | None = None,
) -> Config:
    """Read and check a configuration for ``world`` ranks; ``world_source`` says in errors where that number is from.

    ``source`` is a dict, the path of a file, JSON text (comments and trailing commas are tolerated) or such text in
    base64. ``lenient`` true turns unknown keys into warnings; None leaves that to ``shardledger.lenient``.
    Raises ConfigError with every problem of the file: unknown keys, wrong values, contradictions, keys not available.
    """
    raw, name, where = read_source(source)
    findings = Findings(where=where, lenient=_is_lenient(raw) if lenient is None else lenient)
    known = tidy(Config, "", raw, findings)
    if lenient is not None:
        known["shardledger"] = {**known.get("shardledger", {}), "lenient": lenient}
    for section, checked in (
        ("optimizer", check_optimizer(known.get("optimizer"), findings)),
        ("scheduler", check_scheduler(known.get("scheduler"), known.get("optimizer"), findings)),
    ):
        if checked is not None:
            known[section] = checked
    known.update(resolve_batch(known, world, world_source, findings))
    config, unread = _typed(known, findings)
    check(config, unread, findings)
    return with_notes(config, findings.close(name))


def _is_lenient(raw: Mapping[str, Any]) -> bool:
    own = raw.get("shardledger")
    try:
        return bool(KINDS["bool"].validate_python(own.get("lenient", False))) if isinstance(own, Mapping) else False
    except ValidationError:
        return False


def _typed(known: Mapping[str, Any], findings: Findings) -> tuple[Config, frozenset[str]]:
    """Return the typed configuration without the keys that hold wrong values, and the top-level names of those.

    Leaving them out lets later checks report what is wrong elsewhere in the same reading.
    """
    try:
        return Config.model_validate(known), frozenset()
    except ValidationError as error:
        findings.invalid("", error, _help)
        locations = [detail["loc"] for detail in error.errors(include_url=False)]
    readable = known
    for location in locations:
        readable = _without(readable, location)
    return Config.model_validate(readable), frozenset(str(location[0]) for location in locations)


def _without(values: Mapping[str, Any], location: tuple[int | str, ...]) -> dict[str, Any]:
    """Return ``values`` without the entry at ``location``, or without the section in which it is missing."""
    first, *rest = location
    name = str(first)
    others = {key: value for key, value in values.items() if key != name}
    section = values.get(name)
    if not rest or not isinstance(section, Mapping) or rest[0] not in section:
        return others
    return {**others, name: _without(section, tuple(rest))}


def _help(location: tuple[int | str, ...]) -> str:
    """Return the help text of the field at a location."""
    model: type[Section] | None = Config
    text = ""
    for part in location:
        field = model.model_fields.get(str(part)) if model is not None else None
        if field is None:
            break
        text, model = field.description or "", section_of(field)
    return text
