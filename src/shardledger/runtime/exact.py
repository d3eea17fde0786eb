"""Sums of squares that do not depend on the order of summation, nor on how the elements are spread over ranks.

Every square is scaled by one power of two that all ranks share and cut to 62 binary digits after the point; sums of such
integers are exact, and integer addition is associative. What is cut off is below 2**-62 of the largest square.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_CHUNK = 1 << 20
_DIGITS = 31
"""Binary digits of each of the two halves; 2**32 of them fit an int64."""


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """Largest absolute value; NaN when there is one."""
    found = 0.0
    for tensor in tensors:
        if tensor.numel():
            value = float(tensor.abs().max())
            found = value if math.isnan(value) else max(found, value)
            if math.isnan(found):
                return found
    return found


def square_sum(tensors: Iterable[torch.Tensor], bound: float) -> list[float]:
    """Sum of squares of elements at most ``bound`` in size, as four numbers below 2**32 that float64 holds exactly."""
    exponent = math.frexp(bound)[1]
    high = low = 0
    for tensor in tensors:
        flat = torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor
        for start in range(0, flat.numel(), _CHUNK):
            part = flat[start : start + _CHUNK].double().mul_(math.ldexp(1.0, -exponent))
            part.mul_(part).mul_(2.0**_DIGITS)
            whole = part.floor()
            high += int(whole.to(torch.int64).sum())
            low += int(part.sub_(whole).mul_(2.0**_DIGITS).floor_().to(torch.int64).sum())
    total = (high << _DIGITS) + low
    return [float(total >> shift & 0xFFFFFFFF) for shift in (0, 32, 64)] + [float(total >> 96)]


def norm(sums: Iterable[list[float]], bound: float) -> float:
    """The norm from every rank's ``square_sum``."""
    total = 0
    for words in sums:
        total += sum(int(word) << shift for word, shift in zip(words, (0, 32, 64, 96), strict=True))
    exponent = math.frexp(bound)[1]
    return math.ldexp(math.sqrt(total), exponent - _DIGITS)
