"""Values that are neither tensors nor JSON: written by ``torch.save``, read back without running code from the file."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from shardledger.errors import CheckpointError

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
_JSON_SCALARS = (type(None), bool, int, float, str)


def is_json(value: Any) -> bool:
    """Whether JSON gives the value back as it was (tuples and other keys than text it does not)."""
    if type(value) is dict:
        return all(type(key) is str and is_json(item) for key, item in value.items())
    if type(value) is list:
        return all(is_json(item) for item in value)
    return type(value) in _JSON_SCALARS


def pack(value: Any, what: str) -> bytes:
    """The bytes of a ``.pt`` file.

    Raises:
        CheckpointError: the value could not be read back.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True, map_location="cpu")
    except (pickle.PickleError, RuntimeError, TypeError, AttributeError) as error:
        reason = _reason(error)
        raise CheckpointError(
            f"{what} holds something that a checkpoint cannot give back without running code from the file ({reason}). "
            f"Use plain values and tensors, or allow its class with torch.serialization.add_safe_globals([...]) before "
            f"saving and before loading."
        ) from error
    return buffer.getvalue()


def unpack(path: Path) -> Any:
    """The value of a ``.pt`` file, tensors on the CPU.

    Raises:
        CheckpointError: it is damaged, or holds classes that were not allowed.
    """
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.PickleError, RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        reason = _reason(error)
        raise CheckpointError(
            f"{path} cannot be read ({reason}). When it names a class of yours, allow it with "
            f"torch.serialization.add_safe_globals([...]) before loading."
        ) from error


def _reason(error: BaseException) -> str:
    """The class that torch would not read, out of a page of advice; else how the page begins."""
    found = _REFUSED.search(str(error))
    return f"it needs {found[1]}" if found else " ".join(str(error).split())[:300]
