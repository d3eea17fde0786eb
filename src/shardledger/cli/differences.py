"""When are two runs different? Rounding told from bugs by measuring how far rounding alone goes.

No fixed tolerance does it. AdamW divides each gradient by its own size, so an element whose true gradient is zero (the key
bias of attention is one) moves by the full learning rate in the direction of its rounding error: two correct runs that
round differently are as far apart there as a weight that was never updated. So a second reference runs beside the first,
its initial weights and every rank's gradients moved by one rounding. What lies between the two references is what rounding
does to *this* model at *this* step, tensor by tensor, and the engine may be ``FACTOR`` times as far from the reference.

Measured on gpt:1m with AdamW (lr 1e-3), 5 steps, 2 and 4 ranks, stages 0 to 3, on CPU. Differences of tensors
are counted in parts of the tensor's own movement since the start, root mean square of both; a bias of attention is always
the worst tensor, for the reason above.

                                      engine to reference     reference to reference
    fp32   loss, relative             0                       2e-7
           gradient norm, relative    3e-15                   2e-7
           tensors: median, worst     0, 0                    9e-6, 3e-4
    bf16   loss, relative             0                       7e-5
           gradient norm, relative    4e-16                   2e-4
           tensors: median, worst     0, 0                    4e-2, 0.5

The zeros are without clipping, on gloo, on a power of two of ranks: there the reference adds and divides as the engine does.
Clipping multiplies by a coefficient of a norm that the engine squares partly in fp32 (1e-7), three ranks are divided by once
where clip_grad_norm_ divides twice, and torch's plain AdamW loop rounds otherwise than the fused kernel that both sides use.
Each of them alone took the engine 1e-7 to 2e-7 (median) and 1e-4 (worst) from the reference in fp32, 4e-4 and 6e-2 in bf16: no
further than the references are from each other. Bugs are far outside: a tensor that is not updated differs by 1, one rank's
gradient left out of one block changes the norm by 7e-2, dropout masks of another generator a loss by 5e-4 to 3e-2. What
cannot be seen: in bf16, a few wrong elements of a large tensor; ``--tolerance`` is the stricter question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

FACTOR = 10.0
LEAST = {False: 1e-6, True: 1e-4}
"""By 16-bit or not: difference of losses and norms that is allowed however close the references are, relative."""
MOST = {False: 1e-4, True: 5e-3}
"""Difference of losses that is never allowed: references that far apart show a model that does not repeat itself."""
SHARE = 1e-4
"""Part of a tensor's own movement that is always allowed, in the mean square; ten times that for its largest element."""
ROUNDING = 2.4e-7
"""Two roundings of fp32, relative: what adding an update to a large weight may lose."""

Losses = Sequence[Sequence[float]]  # [rank][micro-batch]
State = Mapping[str, "Tensor"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One number or tensor that is further from the reference than rounding explains."""

    kind: str
    """``"loss"``, ``"gradient norm"``, ``"weight"``, ``"frozen weight"``, ``"buffer"`` or ``"drift"`` (of buffers)."""
    step: int
    """From 1; 0 is before the first step."""
    size: float
    allowed: float
    engine: float
    reference: float
    rank: int | None = None
    micro_batch: int | None = None
    name: str = ""
    element: tuple[int, ...] | None = None
    """Where in the tensor ``engine`` and ``reference`` stand; None where the tensor as a whole is meant."""


@dataclass(frozen=True, kw_only=True)
class TensorVerdict:
    """All tensors after one step: the first that differs, and the largest difference of any."""

    first: Difference | None
    largest: float
    largest_name: str


class Judge:
    """Compares the engine with the reference, step by step.

    Without ``tolerance`` it needs the second reference; with it, a loss, a norm or a tensor may differ by ``tolerance``
    times its largest absolute value, and what is not trained must be equal bit for bit in either case.
    """

    def __init__(self, initial: State, kinds: Mapping[str, str], *, sixteen_bit: bool, tolerance: float | None) -> None:
        self._initial = initial
        self._kinds = kinds
        self._tolerance = tolerance
        self._least = LEAST[sixteen_bit]
        self.most = MOST[sixteen_bit]
        """Largest relative difference of losses that rounding may ever explain."""
        self.loss_noise = 0.0
        """How far the references' losses have been apart at most, relative: one step may be close by luck."""
        self._norm_noise = 0.0

    def initial(self, engine: State, reference: State) -> list[Difference]:
        """What both sides start from, bit for bit: one difference at most."""
        for name, there in reference.items():
            if not there.equal(engine[name]):
                return [self._at_largest(0, name, engine[name], there, 0.0)]
        return []

    def drift(self, step: int, rank: int, name: str, losses: Sequence[float]) -> Difference | None:
        """The loss of a micro-batch of ``rank`` with that rank's buffers and with rank 0's, when they differ."""
        allowed = self._loss_allowed()
        if _relative(*losses) <= allowed:
            return None
        return Difference(
            kind="drift", step=step, size=abs(losses[0] - losses[1]), allowed=allowed * abs(losses[1]), rank=rank, name=name,
            engine=losses[0], reference=losses[1],
        )  # fmt: skip

    def losses(self, step: int, engine: Losses, reference: Losses, noisy: Losses | None) -> Difference | None:
        """The first loss that differs, in the order in which the ranks' micro-batches are counted."""
        cells = [(rank, micro) for rank, row in enumerate(reference) for micro in range(len(row))]
        if noisy is not None:
            apart = [_relative(noisy[r][m], reference[r][m]) for r, m in cells]
            self.loss_noise = max(self.loss_noise, *apart)
        allowed = self._loss_allowed()
        for rank, micro in cells:
            here, there = engine[rank][micro], reference[rank][micro]
            if _relative(here, there) > allowed:
                return Difference(
                    kind="loss", step=step, size=abs(here - there), allowed=allowed * abs(there),
                    engine=here, reference=there, rank=rank, micro_batch=micro,
                )  # fmt: skip
        return None

    def norm(self, step: int, engine: float, reference: float, noisy: float | None) -> Difference | None:
        """The norm of the averaged gradient before clipping."""
        if noisy is not None:
            self._norm_noise = max(self._norm_noise, _relative(noisy, reference))
        allowed = max(self._least, FACTOR * self._norm_noise) if self._tolerance is None else self._tolerance
        if _relative(engine, reference) <= allowed:
            return None
        return Difference(
            kind="gradient norm", step=step, size=abs(engine - reference), allowed=allowed * abs(reference),
            engine=engine, reference=reference,
        )  # fmt: skip

    def tensors(self, step: int, engine: State, reference: State, noisy: State | None) -> TensorVerdict:
        """Every tensor of the state, in its order."""
        typical = self._typical(reference, noisy) if noisy is not None else (0.0, 0.0)
        first: Difference | None = None
        largest, largest_name = 0.0, ""
        for name, there in reference.items():
            here = engine[name]
            if there.equal(here) or not there.numel():
                continue
            apart = _apart(here, there)
            size = float(apart.max())
            if not size <= largest:  # also when it is not a number
                largest, largest_name = size, name
            mean_allowed, most_allowed = self._allowed(name, there, noisy, typical)
            if first is None and not size <= most_allowed:
                first = self._at_largest(step, name, here, there, most_allowed)
            elif first is None and not _rms(apart) <= mean_allowed:
                first = Difference(
                    kind=self._kinds[name], step=step, size=_rms(apart), allowed=mean_allowed, name=name,
                    engine=_rms(here), reference=_rms(there),
                )  # fmt: skip
        return TensorVerdict(first=first, largest=largest, largest_name=largest_name)

    def _at_largest(self, step: int, name: str, here: Tensor, there: Tensor, allowed: float) -> Difference:
        apart = _apart(here, there)
        place = _place(int(apart.argmax()), tuple(there.shape))
        return Difference(
            kind=self._kinds[name], step=step, size=float(apart.max()), allowed=allowed, name=name, element=place,
            engine=_number(here[place]), reference=_number(there[place]),
        )  # fmt: skip

    def _loss_allowed(self) -> float:
        if self._tolerance is not None:
            return self._tolerance
        return min(self.most, max(self._least, FACTOR * self.loss_noise))

    def _typical(self, reference: State, noisy: State) -> tuple[float, float]:
        """What rounding does to the tensor in the middle: a small tensor may be close by luck. Mean square and largest,
        as parts of the movement."""
        means, mosts = [], []
        for name, there in reference.items():
            moved = _finite(_apart(there, self._initial[name]))
            if self._kinds[name] == "weight" and moved.numel() and float(moved.max()) > 0:
                noise = _finite(_apart(noisy[name], there))
                means.append(_rms(noise) / _rms(moved))
                mosts.append(float(noise.max()) / float(moved.max()))
        return (median(means), median(mosts)) if means else (0.0, 0.0)

    def _allowed(
        self, name: str, there: Tensor, noisy: State | None, typical: tuple[float, float]
    ) -> tuple[float, float]:
        """Mean square and largest difference that rounding explains."""
        moved = _finite(_apart(there, self._initial[name]))
        exact = not (there.is_floating_point() or there.is_complex())
        if exact or self._kinds[name] != "weight" and not moved.any():
            return 0.0, 0.0
        height = float(_finite(there.abs()).max())
        if self._tolerance is not None or noisy is None:
            return math.inf, (self._tolerance or 0.0) * height
        noise = _finite(_apart(noisy[name], there))
        mean = max(FACTOR * _rms(noise), max(SHARE, FACTOR * typical[0]) * _rms(moved))
        most = max(FACTOR * float(noise.max()), max(10 * SHARE, FACTOR * typical[1]) * float(moved.max()))
        return mean + ROUNDING * height, most + ROUNDING * height


def _relative(here: float, there: float) -> float:
    """|here - there| / |there|; 0 where neither is finite, infinite where one is not."""
    if not math.isfinite(here) or not math.isfinite(there):
        return 0.0 if math.isfinite(here) == math.isfinite(there) else math.inf
    return abs(here - there) / abs(there) if there else math.inf if here else 0.0


def _apart(here: Tensor, there: Tensor) -> Tensor:
    """|here - there| in fp64, elementwise; 0 where neither is finite, infinite where one is not."""
    wide = (here - there).abs().double() if here.is_complex() else (here.double() - there.double()).abs()
    same = here.isfinite() == there.isfinite()
    return wide.masked_fill(~here.isfinite() & same, 0.0).masked_fill(~same, math.inf)


def _finite(tensor: Tensor) -> Tensor:
    """With zeros for what is not finite."""
    return tensor.masked_fill(~tensor.isfinite(), 0)


def _rms(tensor: Tensor) -> float:
    return float(tensor.abs().double().square().mean().sqrt())


def _number(value: Tensor) -> float:
    return float(value.abs()) if value.is_complex() else float(value)


def _place(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The indices of an element of the flattened tensor."""
    place = []
    for size in reversed(shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))
