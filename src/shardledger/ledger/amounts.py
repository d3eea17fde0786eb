"""Byte counts as text, in both of the units people use: GB is 10⁹ bytes, GiB is 1024³ (7 % more)."""

from __future__ import annotations

_DECIMAL = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_BINARY = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def gib(count: int) -> str:
    """``12.3 GiB``, or the binary unit that leaves at least one digit before the point."""
    return _in_unit(count, _BINARY)


def gb(count: int) -> str:
    """``12.3 GB``, or the decimal unit that leaves at least one digit before the point."""
    return _in_unit(count, _DECIMAL)


def common_unit(largest: int) -> tuple[tuple[str, int], tuple[str, int]]:
    """The decimal and the binary unit in which a table whose largest entry is ``largest`` bytes is read best."""
    for decimal, binary in zip(_DECIMAL[1:], _BINARY[1:], strict=True):
        if abs(largest) >= binary[1]:
            return decimal, binary
    return _DECIMAL[-1], _BINARY[-1]


def in_unit(count: int, size: int) -> str:
    """A number of ``size`` bytes each, three digits, never in exponents: ``120``, ``31.4``, ``0.117``, ``0``."""
    value = count / size
    if count == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.1f}"
    return f"{value:.2f}" if abs(value) >= 10 else f"{value:.3f}"


def parameters(count: int) -> str:
    """``7.5 B`` for 7,500,000,000 parameters."""
    for name, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {name}"
    return str(count)


def _in_unit(count: int, units: tuple[tuple[str, int], ...]) -> str:
    for name, size in units:
        # Ten of the largest unit: below, numbers of one text stay in one unit and can be compared.
        if abs(count) >= (10 * size if name == units[0][0] else size):
            return f"{count / size:,.1f} {name}"
    return f"{count} bytes"
