"""What to tell somebody who wrote a key that does not exist: the nearest key, or the section it belongs in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from functools import lru_cache

from shardledger.config.findings import join
from shardledger.config.known_keys import ALIASES, DEPRECATED, FOREIGN_WORDS, RULES
from shardledger.config.model import Config
from shardledger.config.optimizer import ADAM_SWITCHES, TORCH_PARAMS
from shardledger.config.scheduler import SCHEDULES
from shardledger.config.section import Section, section_of

_SAME_SECTION = 0.7
_OTHER_SECTION = 0.8
_FEW_KEYS = 14
_MOST_PLACES = 3


def explain_unknown(path: str, key: str, valid: Iterable[str] | None = None) -> str:
    """Return one sentence or two on an unknown ``key`` of the section ``path`` ("" is the top level).

    ``valid`` are the keys of that section when they depend on more than the section (an optimizer's arguments).
    """
    here = join(path, key)
    keys = sorted(valid if valid is not None else key_index().get(path, ()))
    if key in FOREIGN_WORDS:
        return f"{here}: unknown key; {FOREIGN_WORDS[key]}"
    if valid is not None and key in key_index().get(path, ()):
        return f"{here}: not an argument of the chosen type; it takes {', '.join(keys)}"
    places = [section for section, others in key_index().items() if key in others and section != path]
    if 0 < len(places) <= _MOST_PLACES:
        return f"{here}: unknown key here; {key} belongs {_places(places)}"
    near = _nearest(key, keys, _SAME_SECTION)
    if near:
        return f"{here}: unknown key; did you mean {join(path, near)}?"
    everywhere = {
        other: section for section, others in reversed(list(key_index().items())) if section != path for other in others
    }
    near = _nearest(key, everywhere, _OTHER_SECTION)
    if near:
        return f"{here}: unknown key; did you mean {near} {_places([everywhere[near]])}?"
    if len(keys) <= _FEW_KEYS:
        return f"{here}: unknown key; valid here: {', '.join(keys)}"
    return f"{here}: unknown key, and no key has a similar name; remove it"


@lru_cache(maxsize=1)
def key_index() -> Mapping[str, frozenset[str]]:
    """Return every key this package knows, by the path of its section; "" is the top level."""
    index: dict[str, frozenset[str]] = {}
    _visit(Config, "", index)
    torch_params = set().union(*TORCH_PARAMS.values(), ADAM_SWITCHES)
    index["optimizer.params"] = frozenset(torch_params)
    index["scheduler.params"] = frozenset(set().union(*SCHEDULES.values()))
    return index


def _visit(model: type[Section], path: str, index: dict[str, frozenset[str]]) -> None:
    rules = RULES.get(path, {})
    index[path] = frozenset({*model.model_fields, *rules, *ALIASES.get(path, ()), *DEPRECATED.get(path, ())})
    for name, field in model.model_fields.items():
        child = section_of(field)
        if child is not None:
            _visit(child, join(path, name), index)
    for name, rule in rules.items():
        if rule.keys is not None:
            index[join(path, name)] = frozenset(rule.keys)


def _nearest(key: str, keys: Iterable[str], cutoff: float) -> str | None:
    folded = {candidate.lower(): candidate for candidate in keys}
    matches = get_close_matches(key.lower().replace("-", "_"), folded, n=1, cutoff=cutoff)
    return folded[matches[0]] if matches else None


def _places(sections: Iterable[str]) -> str:
    return " or ".join(f"in {section}" if section else "at the top level" for section in sections)
