"""The base of every section: frozen, closed, and able to write itself out in DeepSpeed's key names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A group of keys. Frozen; an unknown key is an error; every field has a description that is its help text.

    Fields may carry hints in ``json_schema_extra``: ``auto`` says what the word "auto" means for the key ("plan":
    left open for the plan, "budget": chosen by the memory budget, "ranks": agreed when they meet, "batch": derived
    with the other batch sizes, "refuse": an error, absent: the default is used); ``no_effect`` holds the reason why a
    key is accepted and changes nothing; ``from_stage`` is the lowest ZeRO stage that reads the key; ``bytes`` marks a
    size, written out with its unit; ``when_off`` is the reason why the key changes nothing while the ``enabled`` beside
    it is false.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """Return the values, JSON-ready, under DeepSpeed's key names.

        Left out: what is None, and what changes nothing and was not given.
        """
        plain: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            silent = {"no_effect", "from_stage", "when_off"} & hints(field).keys() and name not in self.model_fields_set
            plain_value = value.to_dict() if isinstance(value, Section) else _plain(value)
            if value is not None and hints(field).get("bytes"):
                plain_value = f"{value}B"
            if value is None or silent or (plain_value == {} and isinstance(value, Section)):
                continue
            plain[field.serialization_alias or name] = plain_value
        return plain


def hints(field: FieldInfo) -> Mapping[str, Any]:
    """Return the hints of a field (see ``Section``)."""
    extra = field.json_schema_extra
    return extra if isinstance(extra, dict) else {}


def section_of(field: FieldInfo) -> type[Section] | None:
    """Return the section class a field holds (``X`` or ``X | None``), or None when it holds a plain value."""
    candidates = (field.annotation, *getattr(field.annotation, "__args__", ()))
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
