"""What was found while a configuration was read: everything that is told to the user, collected instead of raised."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from shardledger.errors import ConfigError

Describe = Callable[[tuple[int | str, ...]], str]


@dataclass(frozen=True)
class Notes:
    """What a loaded configuration has to tell besides its values."""

    source: str = "the configuration"
    """Where the keys came from: a file name, or what kind of object was passed."""
    stated: frozenset[str] = frozenset()
    """Full paths of the keys that were given a value (not ``null``, not ``"auto"``)."""
    auto: frozenset[str] = frozenset()
    """Full paths of the keys that were given as ``"auto"``."""
    no_effect: tuple[str, ...] = ()
    """One line per key that was accepted and changes nothing here, with the reason."""
    resolutions: tuple[str, ...] = ()
    """One line per value that was derived or chosen, with the rule that chose it."""
    warnings: tuple[str, ...] = ()
    """One line per outdated spelling, and per unknown key when the reading is lenient."""
    inert: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``no_effect`` that have no attribute, with their values, so that the file can be written out again."""


@dataclass
class Findings:
    """Collects problems and notes of one configuration; ``close`` raises when there is any problem.

    ``where`` stands in front of every problem (the file name, or nothing). ``lenient`` turns unknown keys into
    warnings. ``spelling`` maps canonical key paths to the names the file used.
    """

    where: str = ""
    lenient: bool = False
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    no_effect: list[str] = field(default_factory=list)
    resolutions: list[str] = field(default_factory=list)
    stated: set[str] = field(default_factory=set)
    auto: set[str] = field(default_factory=set)
    inert: dict[str, Any] = field(default_factory=dict)
    spelling: dict[str, str] = field(default_factory=dict)

    def problem(self, text: str) -> None:
        """Record one problem; the reading goes on so that the user sees all of them at once."""
        self.problems.append(f"{self.where}: {text}" if self.where else text)

    def unknown(self, text: str) -> None:
        """Record an unknown key: a problem, or a warning when the reading is lenient."""
        if self.lenient:
            self.warnings.append(f"{text} (ignored, because the reading is lenient)")
        else:
            self.problem(text)

    def written(self, path: str) -> str:
        """Return a key path as the user spelled it, given its canonical form."""
        for canonical, spelled in self.spelling.items():
            if path == canonical or path.startswith(f"{canonical}."):
                return spelled + path[len(canonical) :]
        return path

    def invalid(self, path: str, error: ValidationError, describe: Describe = lambda location: "") -> None:
        """Record every problem of a pydantic error that arose at ``path`` ("" is the top level).

        ``describe`` returns the help text of the field at a location inside ``path``.
        """
        for detail in error.errors(include_url=False):
            here = self.written(join(path, dotted(detail["loc"])))
            help_text = describe(detail["loc"])
            meaning = f" ({help_text})" if help_text else ""
            if detail["type"] == "missing":
                self.problem(f"{here} is missing{meaning}")
            else:
                message = detail["msg"].removeprefix("Value error, ")
                self.problem(f"{here} = {shown(detail['input'])}: {message}{meaning}")

    def keep_inert(self, path: str, value: Any) -> None:
        """Remember a value that has no attribute, JSON-ready, under its key path."""
        *sections, key = path.split(".")
        place = self.inert
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = json.loads(json.dumps(value, default=str))

    def close(self, source: str) -> Notes:
        """Return the notes of a configuration without problems.

        Raises ConfigError with every problem found, in the order of discovery.
        """
        if self.problems:
            raise ConfigError(*self.problems)
        return Notes(
            source=source,
            stated=frozenset(self.stated),
            auto=frozenset(self.auto),
            no_effect=tuple(sorted(self.no_effect)),
            resolutions=tuple(self.resolutions),
            warnings=tuple(self.warnings),
            inert=self.inert,
        )


def join(*parts: str) -> str:
    """Return the full path of a key; empty parts (the top level) are left out, positions need no dot."""
    return ".".join(part for part in parts if part).replace(".[", "[")


def dotted(location: tuple[int | str, ...]) -> str:
    """Return a pydantic error location as a key path, list positions in brackets."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def shown(value: object) -> str:
    """Return a value as JSON writes it, cut to a length that fits an error message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
