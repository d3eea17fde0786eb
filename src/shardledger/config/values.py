"""The kinds of value a configuration key can hold, each declared once.

``Whole`` and its bounded forms take ``5e8`` and ``"2"``; they refuse booleans and ``1.5``. ``Flag`` takes what pydantic
takes (``true``, ``"true"``, ``"off"``, ``1``), so the text ``"false"`` is false, never a truthy string. ``Number`` is a
finite float. ``DtypeName`` takes the usual spellings of three dtypes. The word ``"auto"`` is no value: it is resolved
before any of these sees it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from shardledger.config.quantities import byte_size

AUTO = "auto"

Precision = Literal["fp32", "bf16", "fp16"]

_DTYPE_SPELLINGS: Mapping[str, Precision] = {
    "fp32": "fp32", "float32": "fp32", "float": "fp32", "32": "fp32",
    "bf16": "bf16", "bfloat16": "bf16",
    "fp16": "fp16", "float16": "fp16", "half": "fp16", "16": "fp16",
}  # fmt: skip


def dtype_name(value: object) -> Precision:
    """Return the canonical name of a dtype written as ``bf16``, ``bfloat16`` or ``torch.bfloat16`` (likewise others).

    Raises ValueError for every other spelling; ``16-mixed`` is one, because it does not say which 16-bit type it means.
    """
    spelling = str(value).lower().removeprefix("torch.")
    if isinstance(value, bool) or spelling not in _DTYPE_SPELLINGS:
        raise ValueError(f"{value!r} is not a dtype known here; write fp32, bf16 or fp16")
    return _DTYPE_SPELLINGS[spelling]


def _whole(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a whole number is needed, not true or false")
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = _float_of_text(value)
    if isinstance(value, float):
        if not math.isfinite(value) or not value.is_integer():
            raise ValueError(f"a whole number is needed, not {value}")
        return int(value)
    return value


def _folder(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _number(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("a number is needed, not true or false")
    return _float_of_text(value) if isinstance(value, str) else value


def _float_of_text(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"a number is needed, not the text {text!r}") from None


def _never_if_infinite(value: object) -> object:
    return None if isinstance(value, float) and math.isinf(value) else value


Whole = Annotated[int, BeforeValidator(_whole)]
Count = Annotated[Whole, Field(ge=0)]
Positive = Annotated[Whole, Field(ge=1)]
Stage = Annotated[Whole, Field(ge=0, le=3)]
Folder = Annotated[str, BeforeValidator(_folder)]

Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
NonNegative = Annotated[Number, Field(ge=0)]
Flag = bool
ByteSize = Annotated[int, BeforeValidator(byte_size)]
"""Bytes, written as ``80GiB``, ``80GB`` or a number."""
DtypeName = Annotated[Precision, BeforeValidator(dtype_name)]
StepInterval = Annotated[Positive | None, BeforeValidator(_never_if_infinite)]
"""Steps between two prints; Infinity, which launchers write for "never", is None."""

Fraction = Annotated[Number, Field(ge=0, lt=1)]

KINDS: Mapping[str, TypeAdapter[Any]] = {
    "bool": TypeAdapter(Flag),
    "bool?": TypeAdapter(Flag | None),
    "int": TypeAdapter(Whole),
    "count": TypeAdapter(Count),
    "positive": TypeAdapter(Positive),
    "number": TypeAdapter(Number),
    "nonnegative": TypeAdapter(NonNegative),
    "nonnegative?": TypeAdapter(NonNegative | None),
    "betas": TypeAdapter(tuple[Fraction, Fraction]),
    "pair": TypeAdapter(tuple[Number, Number]),
    "warmup": TypeAdapter(Literal["log", "linear"]),
    "text": TypeAdapter(str),
    "list": TypeAdapter(list[Any]),
    "object": TypeAdapter(dict[str, Any]),
    "dtype": TypeAdapter(DtypeName),
    "any": TypeAdapter(Any),
}
"""Short names for the tables of keys in ``known_keys``, ``optimizer`` and ``scheduler``."""
