"""From whatever the caller holds (dict, path, JSON text, base64) to one plain dict, with every defect of form named."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardledger.config.findings import join
from shardledger.errors import ConfigError

_COMMENT_STARTS = ("#", "//", "/*")
_STRING_OR_NOISE = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*") | (?P<comment>/\*.*?\*/|//[^\n]*|\#[^\n]*)""", re.VERBOSE | re.DOTALL
)
_STRING_OR_TRAILING_COMMA = re.compile(r"""(?P<string>"(?:\\.|[^"\\\n])*") | (?P<comma>,)(?=\s*[}\]])""", re.VERBOSE)
_PYTHON_WORDS = re.compile(r"(?:True|False|None)\b")


class _Pairs(dict[str, Any]):
    """One JSON object that remembers which of its keys the file wrote more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]


def read_source(source: str | os.PathLike[str] | Mapping[str, Any]) -> tuple[dict[str, Any], str, str]:
    """Return the raw keys, a name for their origin, and the prefix for error messages ("" unless it is a file).

    Accepts a mapping, the path of a file, JSON text, or JSON text in (URL-safe) base64. Comments (``#``, ``//``,
    ``/* */``) and trailing commas are tolerated in text.
    Raises ConfigError when the source cannot be read, is not one JSON object, or repeats a key.
    """
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}, "the config dict", ""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not _looks_like_text(source)):
        decoded = _from_base64(source) if isinstance(source, str) else None
        if decoded is not None:
            return _parse(decoded, "base64 text"), "the base64 config", ""
        path = os.fspath(source)
        return _parse(_read_file(path), path), path, path
    if isinstance(source, str):
        return _parse(source, "config text"), "the config text", ""
    raise ConfigError(f"config must be a dict, a path or JSON text, not {type(source).__name__}")


def _looks_like_text(source: str) -> bool:
    start = source.lstrip()
    return not start or start.startswith(("{", *_COMMENT_STARTS)) or "\n" in source or _is_json(source)


def _is_json(source: str) -> bool:
    """Whether the source is JSON of some kind, and not the name of an existing file."""
    try:
        json.loads(source)
    except ValueError:
        return False
    return not os.path.exists(source)


def _from_base64(source: str) -> str | None:
    """Return the decoded text when the source is base64 of a JSON object and not the name of an existing file."""
    if len(source) < 4 or os.path.exists(source):
        return None
    try:
        padded = source.translate(str.maketrans("-_", "+/")) + "=" * (-len(source) % 4)
        text = base64.b64decode(padded, validate=True).decode("utf-8")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return None
    return text if _looks_like_text(text) else None


def _read_file(path: str) -> str:
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder; give the path of a JSON file")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"no file {path!r} (seen from {os.getcwd()}), and it is not JSON text either") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _parse(text: str, name: str) -> dict[str, Any]:
    plain = _without_noise(text)
    if not plain.strip():
        raise ConfigError(f"{name} is empty; the smallest configuration is {{}}")
    try:
        parsed = json.loads(plain, object_pairs_hook=_Pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{name}: line {error.lineno}, column {error.colno}: {error.msg}. {_cure(plain, error)}"
        ) from None
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name} must hold one JSON object {{...}}, not {type(parsed).__name__}")
    repeated = list(_repeated_keys(parsed, ""))
    if repeated:
        raise ConfigError(*(f"{name}: {path} is written more than once; keep one of them" for path in repeated))
    return parsed


def _without_noise(text: str) -> str:
    """Blank comments and trailing commas with spaces, so that line and column of a later error still hold."""

    def blank(match: re.Match[str]) -> str:
        if match.group("string"):
            return match.group()
        return "".join(character if character == "\n" else " " for character in match.group())

    return _STRING_OR_TRAILING_COMMA.sub(blank, _STRING_OR_NOISE.sub(blank, text))


def _cure(text: str, error: json.JSONDecodeError) -> str:
    if _PYTHON_WORDS.match(text, error.pos):
        return "JSON writes true, false and null in lower case."
    return "Keys and text stand in double quotes, and a comma stands between two entries."


def _repeated_keys(value: object, path: str) -> Iterator[str]:
    if isinstance(value, _Pairs):
        yield from (join(path, key) for key in value.repeated)
        for key, child in value.items():
            yield from _repeated_keys(child, join(path, key))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from _repeated_keys(child, f"{path}[{index}]")
