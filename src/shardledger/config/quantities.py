"""Amounts as people write them: ``80GiB`` of memory, ``7.5B`` parameters, ``50GB/s``, ``400TFLOP/s``.

Every function takes a number or a text, and raises ValueError with a sentence that says what to write instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"^\s*([+-]?(?:\d[\d_]*)?(?:\.\d+)?(?:e[+-]?\d+)?)\s*([a-z/]*)\s*$", re.IGNORECASE)
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SMALLEST_BARE = 1_000_000
"""Bytes: a smaller number without a unit is a forgotten unit."""
_SMALLEST_BARE_COUNT = 1000
"""Parameters: likewise."""
_LARGEST_COUNT = 10**15
_COUNT_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "g": 3, "t": 4}


def byte_size(value: object) -> int:
    """Bytes of ``80GiB`` (1024³), ``80GB`` (10⁹), ``22e9`` or a number."""
    what = "a memory size"
    amount, unit = _split(value, what, "80GiB, 80GB or 22e9")
    if unit in _POWERS:
        power = _POWERS[unit]
        letter = unit.upper()
        decimal, binary = int(amount * 1000**power), int(amount * 1024**power)
        raise ValueError(
            f"{value!r} leaves open which {letter} is meant: write {amount:g}{letter}B ({decimal:,} bytes) or "
            f"{amount:g}{letter}iB ({binary:,} bytes)"
        )
    scale = _byte_scale(unit)
    if scale is None:
        raise ValueError(f"{value!r} is not {what}: the unit {unit!r} is not known; write 80GiB, 80GB or 22e9")
    if not unit and amount < _SMALLEST_BARE:
        raise ValueError(f"{value!r} without a unit is {amount:g} bytes; did you mean {amount:g}GiB?")
    return _whole(amount * scale, value, what)


def element_count(value: object) -> int:
    """Elements of ``7.5e9``, ``7.5B``, ``125M``, ``1T`` or a number."""
    amount, unit = _split(value, "a number of parameters", "7.5e9, 7.5B or 125M")
    power = _COUNT_POWERS.get(unit)
    if power is None:
        raise ValueError(f"{value!r} is not a number of parameters: use K, M, B or T, as in 7.5B, or write 7.5e9")
    if not unit and amount < _SMALLEST_BARE_COUNT:
        raise ValueError(f"{value!r} without a unit is {amount:g} parameters; did you mean {amount:g}B?")
    if amount * 1000**power > _LARGEST_COUNT:
        raise ValueError(f"{value!r} is more parameters than any model has; write 7.5e9, 7.5B or 125M")
    return _whole(amount * 1000**power, value, "a number of parameters")


def bandwidth(value: object) -> float:
    """Bytes per second of ``50GB/s``, ``50GB`` or ``50e9``."""
    text = re.sub(r"\s*(/s|ps)\s*$", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value
    amount, unit = _split(text, "a bandwidth", "50GB/s or 50e9 (bytes per second)")
    if isinstance(text, str) and re.search(r"(?:[KMGT]b|bits?)\s*$", text):  # capital prefix, small b: bits
        raise ValueError(
            f"{value!r} is in bits: divide by 8 and write bytes, as in {amount / 8:g}{unit[:1].upper()}B/s"
        )
    scale = _byte_scale(unit)
    if scale is None:
        raise ValueError(f"{value!r} is not a bandwidth; write 50GB/s or 50e9 (bytes per second)")
    if not unit and amount < _SMALLEST_BARE:
        raise ValueError(f"{value!r} without a unit is {amount:g} bytes per second; did you mean {amount:g}GB/s?")
    return amount * scale


def flop_rate(value: object) -> float:
    """Floating-point operations per second of ``400TFLOP/s``, ``400T`` or ``4e14``."""
    text = re.sub(r"\s*(flops?(/s)?|flop/s)\s*$", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value
    amount, unit = _split(text, "a speed", "400TFLOP/s or 4e14")
    if unit and unit not in _POWERS:
        raise ValueError(f"{value!r} is not a speed; write 400TFLOP/s or 4e14 (operations per second)")
    if not unit and amount < _SMALLEST_BARE:
        raise ValueError(
            f"{value!r} without a unit is {amount:g} operations per second; did you mean {amount:g}TFLOP/s?"
        )
    return float(amount * 1000 ** (_POWERS[unit] if unit else 0))


def _split(value: object, what: str, example: str) -> tuple[float, str]:
    """The positive number in ``value`` and the unit behind it, in lower case."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{value!r} is not {what}; write {example}")
    found = _NUMBER.match(value) if isinstance(value, str) else _NUMBER.match(repr(value))
    digits = found.group(1) if found else ""
    if found is None or not any(c.isdigit() for c in digits):
        raise ValueError(f"{value!r} is not {what}; write {example}")
    amount = float(digits.replace("_", ""))
    if not math.isfinite(amount) or amount <= 0:
        raise ValueError(f"{value!r} is not {what}: it must be more than zero; write {example}")
    return amount, found.group(2).lower()


def _byte_scale(unit: str) -> int | None:
    scales: Mapping[str, int] = {
        "": 1,
        "b": 1,
        **{f"{letter}b": 1000**power for letter, power in _POWERS.items()},
        **{f"{letter}ib": 1024**power for letter, power in _POWERS.items()},
    }
    return scales.get(unit)


def _whole(amount: float, value: object, what: str) -> int:
    if amount < 1:
        raise ValueError(f"{value!r} is less than one whole: it is not {what}")
    return round(amount)
