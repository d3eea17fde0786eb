"""Gradients of one flat: from autograd into a flat buffer, and summed over ranks into the part this rank keeps.

local     1-D [padded_numel]  gradients of this rank that no other rank has seen. Where GRAD is sharded it lives from
                              the first gradient of a backward pass to its reduction; elsewhere always.
reduced   1-D                 sums over ranks and micro-batches, not yet divided: a shard, or all of it when OPTIM is
                              not sharded. Part of the memory of ``local`` where dtype and sharding allow. Where GRAD is
                              sharded and the device has memory of its own, it lives from the first reduction of a window
                              to the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from shardledger.layout.flat import FlatLayout
from shardledger.runtime.gradient_buffers import BEGUN, Due, Sum, is_unshared
from shardledger.runtime.held import StandIns
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.states import GradState, move
from shardledger.runtime.treesum import TreeSum
from shardledger.transport.link import Copy, HostLink

_WIDENED_NUMEL = 1 << 18
"""Elements of fp16 that are converted at once for a look at them: 1 MiB in fp32, which stays in the cache."""


class GradientListener(Protocol):
    """Who is told what arrives."""

    def gradient_arrived(self) -> None:
        """A parameter received a gradient."""

    def flat_busy(self) -> None:
        """A gradient arrived while the flat's previous ones are being reduced: that reduction must end first."""

    def room_wanted(self) -> None:
        """Gradients of a gathered unit pile up: reductions under way hold as much."""

    def flat_begun(self, unit: int) -> None:
        """A good part of the gradients of ``unit`` has come; told once a backward pass."""

    def flat_complete(self, unit: int) -> None:
        """Every parameter of one flat of ``unit`` has a gradient; told once a backward pass and flat."""


@dataclass
class GradientMode:
    """How gradients are taken now; one object for all flats of an engine."""

    widen: bool = False
    """Keep local gradients in the accumulation dtype: several backward passes come before the next reduction."""
    mute: bool = False
    """Gradients that arrive count as zero: this rank's micro-batch has no weight."""
    link: HostLink | None = None
    """The way to host memory, for sums that rest there."""
    copies: list[Copy] = field(default_factory=list)
    """Sums on that way, in order."""
    made: Callable[[torch.Tensor], None] | None = None
    """Who is shown the buffer of each sum when it is made: a counter of live bytes."""

    def settle(self) -> None:
        """Wait until every sum has come to its home."""
        for copy in self.copies:
            copy.wait()
        self.copies.clear()


@dataclass(frozen=True)
class GradientRule:
    """What does not change about how gradients are kept."""

    accumulate: torch.dtype
    local_accumulate: torch.dtype
    tree: bool
    """Add micro-batches as a tree (reproducible mode)."""
    drops_sums: bool = False
    """Whether sums of sharded gradients are let go of after a step."""


class FlatGradients:
    """Collects the gradients of one trainable flat and tells ``listener`` when every parameter has one."""

    def __init__(
        self,
        flat: FlatParameters,
        rule: GradientRule,
        mode: GradientMode,
        listener: GradientListener,
        *,
        leads: bool = True,
    ) -> None:
        """``leads``: the largest flat of its unit, whose gradients tell how far the unit is."""
        self.flat = flat
        self.state = GradState.EMPTY
        narrow = flat.master_dtype == torch.float32
        local_dtype = rule.local_accumulate if narrow else flat.master_dtype
        self.has_sum = False
        """Whether ``reduced`` holds anything of this window."""
        self.probe: torch.Tensor | None = None
        """A number, finite when this rank's own gradients of the window are; read only when the norm is not."""
        self.partial: TreeSum | None = TreeSum() if rule.tree else None
        """Sums of micro-batches that wait for their neighbour in the tree (reproducible mode)."""
        self._mode = mode
        self._kept = self._empty(local_dtype) if self.keeps_local else None
        self.local: torch.Tensor | None = self._kept
        self._sum = self._make_sum(rule.accumulate if narrow else flat.master_dtype, local_dtype, rule.drops_sums)
        self.present = [False] * len(flat.parameters)
        """Which parameters have had a gradient on this rank since the last step."""
        self._round = [False] * len(flat.parameters)
        """Which have one in the current ``local``."""
        self._due = Due(len(flat.parameters), flat.layout.numel // BEGUN if leads else 0)
        self._places = _Places.of(flat.layout)
        self._stand_ins = StandIns(flat.parameters, [slot.name for slot in flat.layout.slots])
        self._stand_ins.hide()  # what the model brings along is not of this engine's window
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(index, listener))
            for index, parameter in enumerate(flat.parameters)
        ]

    @property
    def accumulate(self) -> torch.dtype:
        """Dtype of ``reduced``."""
        return self._sum.dtype

    @property
    def reduced(self) -> torch.Tensor:
        """The sum over ranks; means something while ``has_sum``."""
        return self._sum.tensor(self._mode.made)

    @property
    def held_sum(self) -> torch.Tensor | None:
        """``reduced``, where it is in memory now."""
        return self._sum.held

    @property
    def dropped_bytes(self) -> int:
        """What ``reduced`` will take again from the next reduction to the step; 0 where it is in memory."""
        return 0 if self._sum.held is not None else self._sum.numel * self._sum.dtype.itemsize

    @property
    def pending_bytes(self) -> int:
        """What local gradients take that do not stay in place: their buffer, and those that wait for it."""
        if self.keeps_local:
            return 0
        early = sum(fresh.nbytes for _, fresh in self._due.early)
        return early + (0 if self.local is None else self.local.untyped_storage().nbytes())

    @property
    def keeps_local(self) -> bool:
        """Whether local gradients stay in place over micro-batches and steps."""
        return not (self.flat.layout.grad_sharded or self.partial is not None)

    @property
    def shared(self) -> bool:
        """Whether ``reduced`` is part of ``local``."""
        return self._kept is not None and self._kept.dtype == self.accumulate

    @property
    def sum_is_away(self) -> bool:
        """Whether sums over ranks rest in host memory, apart from the device."""
        layout, link = self.flat.layout, self._mode.link
        return (
            self.flat.homes.moved
            and link is not None
            and layout.optim_sharded
            and self.partial is None
            and not self.shared
        )

    def begin_backward(self) -> None:
        """A backward pass starts: all parameters are expected once more.

        Raises:
            EngineStateError: see ``refuse_changes``.
        """
        self.refuse_changes()
        self._due.begin()
        self._stand_ins.hide()

    def end_backward(self) -> None:
        """A backward pass is over: whoever looks at ``p.grad`` learns where the gradient is."""
        self._place()
        self._stand_ins.show(self.present)

    def refuse_changes(self) -> None:
        """Refuse that someone has put something else at ``p.grad``, or cleared it: the gradients would not follow.

        Raises:
            EngineStateError: names the parameter.
        """
        self._stand_ins.refuse_changes()

    def ready_to_reduce(self) -> torch.Tensor:
        """The local gradients, complete: zeros where none came. Creates their buffer when it is missing."""
        self._place()
        self._ensure_local()
        local = self.local
        assert local is not None
        for start, end in self._places.gaps:
            local[start:end].zero_()
        if not all(self._round):
            for came, (start, end) in zip(self._round, self._places.spans, strict=True):
                if not came:
                    local[start:end].zero_()
        self._look_at(local)
        self._move(GradState.PENDING)
        self._move(GradState.REDUCING)
        return local

    def reduced_shard(self) -> torch.Tensor:
        """This rank's interval of ``reduced``."""
        return self.reduced if self.flat.layout.optim_sharded else self.flat.interval_of(self.reduced)

    def sum_so_far(self) -> torch.Tensor:
        """This rank's interval of the sum of what has been reduced: ``reduced_shard``, or a copy (reproducible mode)."""
        return self.reduced_shard() if self.partial is None else self.partial.so_far()

    def restart(self, shard: torch.Tensor) -> None:
        """Go on from an edited ``sum_so_far``."""
        if self.partial is not None:
            self.partial = TreeSum()
            self.partial.add(shard)

    def resume(
        self, present: Sequence[bool], rounds: Sequence[bool], *, has_sum: bool, dtype: torch.dtype | None
    ) -> torch.Tensor | None:
        """Go on in the middle of a window, after ``clear`` and after the sum was put where ``sum_so_far`` finds it.

        ``rounds``: parameters with gradients that only this rank has seen, kept in ``dtype``. Returns the buffer that
        the caller fills with those, None when there are none.
        """
        self.has_sum = has_sum
        self.present = list(present)
        self._round = list(rounds)
        if has_sum:
            self._move(GradState.PENDING)
            self._move(GradState.REDUCING)
            self._move(GradState.REDUCED)
            self.local = None if self.shared else self._kept
        if any(rounds):
            self._move(GradState.PENDING)
            if self.local is None and dtype is not None:
                self.local = self._empty(dtype)
        self._stand_ins.show(self.present)
        return self.local if any(rounds) else None

    def unreduced(self, index: int) -> torch.Tensor | None:
        """This rank's gradient of one parameter that no other rank has seen, 1-D; None when there is none."""
        slot = self.flat.layout.slots[index]
        known = self.local is not None and self._round[index]
        return self.local[slot.start : slot.start + slot.numel] if known and self.local is not None else None

    def _look_at(self, local: torch.Tensor) -> None:
        """Keep one number that is finite when all of ``local`` is; one pass at memory speed, no synchronisation.

        A sum, which reads twice as fast as a search for extremes. No infinite value or NaN can leave it finite; that finite
        ones add up to more than the dtype holds is possible, but then this is read only when some other is infinite.
        fp16 holds too little for that. Its sum is taken in fp32, piece by piece: PyTorch converts all of a tensor at once.
        """
        if local.dtype == torch.float16:
            pieces = [piece.sum(dtype=torch.float32) for piece in local.split(_WIDENED_NUMEL)]
            total = torch.stack(pieces).sum()
        else:
            total = local.sum()
        self.probe = total if self.probe is None else self.probe + total

    def target(self) -> tuple[torch.Tensor, bool]:
        """Where a reduction writes this rank's interval, and whether it adds to what is there."""
        shard = self.reduced_shard()
        if self.sum_is_away:
            return torch.empty_like(shard, device=self.flat.device), False
        return (shard, self.has_sum) if self.partial is None else (torch.empty_like(shard), False)

    def settle(self) -> None:
        """Wait until the sums that rest in host memory are there."""
        self._mode.settle()

    def fold(self) -> None:
        """Bring the sum of all micro-batches to ``reduced``, in the order of the tree."""
        if self.partial is not None and self.has_sum:
            self.reduced_shard().copy_(self.partial.total())

    def finished(self, target: torch.Tensor) -> None:
        """The reduction into ``target`` is done: local gradients are spent."""
        self._move(GradState.REDUCED)
        if self.partial is not None:
            self.partial.add(target)
        elif self.sum_is_away:
            assert self._mode.link is not None
            self._mode.copies.append(self._mode.link.to_host(target, self.reduced, add=self.has_sum))
        self.has_sum = True
        self._round = [False] * len(self._round)
        # Where the sum lies in the memory of the local gradients, those that still come take a buffer of their own.
        self.local = None if self.shared else self._kept

    def clear(self) -> None:
        """Forget all gradients: a step was taken, or the window is discarded."""
        self._mode.settle()
        self._move(GradState.EMPTY)
        self.has_sum = False
        if self._sum.drops:
            self._sum.held = None
        if self.partial is not None:
            self.partial = TreeSum()
        self.probe = None
        self.present = [False] * len(self.present)
        self._round = [False] * len(self._round)
        self.local = self._kept
        self._due.early.clear()
        self._stand_ins.hide()

    def reset(self) -> None:
        """Forget all gradients after a failure, whatever state they were in."""
        self.state = GradState.EMPTY
        self.clear()

    def forget(self) -> None:
        """Detach from the parameters and let go of all tensors."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._due.early.clear()
        self._stand_ins.hide()
        self._kept = self.local = self.probe = self.partial = None
        self._sum = Sum(0, self._sum.dtype, self._sum.device, drops=True)
        self._stand_ins.forget()

    def _hook(self, index: int, listener: GradientListener) -> Callable[[nn.Parameter], None]:
        """Moves one fresh gradient into the flat. It runs for every parameter, so it looks up as little as it can."""
        size, stride, start = self._places.strided[index]
        due, kept, layout = self._due, self._kept, self.flat.layout
        unit, numel, gathered = layout.unit, layout.slots[index].numel, layout.param_sharded
        own = None if kept is None else kept.as_strided(size, stride, start)

        def accumulated(parameter: nn.Parameter) -> None:
            fresh = parameter.grad
            if fresh is None:
                return
            parameter.grad = None  # first: the announcement clears what earlier passes left
            listener.gradient_arrived()
            if self.state is GradState.REDUCING:
                listener.flat_busy()
            if self.state is not GradState.PENDING:
                self._move(GradState.PENDING)
            begun = due.count(numel)
            if self.local is kept and own is not None:
                self._take(index, fresh, own)
            else:
                due.early.append((index, fresh))
                if begun and gathered:
                    listener.room_wanted()
                # Of a gathered unit they wait until its weights have gone: the buffer takes their place.
                if self.local is not None or (not gathered and (due.missing <= 0 or due.parameters == 0)):
                    self._place()
            del fresh  # freed when it has been copied, before the next unit's weights take memory
            if begun:
                listener.flat_begun(unit)
            self.present[index] = True
            if due.parameters == 0:
                listener.flat_complete(unit)

        return accumulated

    def _place(self) -> None:
        """Take the flat's buffer, and copy what has come to its place in it."""
        early = self._due.early
        if not early:
            return
        if self.local is None and self._is_whole(early[0][1]):
            index, fresh = early.pop()
            self.local, self._round[index] = fresh.view(-1), True
            return
        self._ensure_local()
        assert self.local is not None
        for index, fresh in early:
            self._take(index, fresh, self.local.as_strided(*self._places.strided[index]))
        early.clear()

    def _take(self, index: int, fresh: torch.Tensor, target: torch.Tensor) -> None:
        if self._round[index]:
            if not self._mode.mute:
                target.add_(fresh)
            return
        if self._mode.mute:
            target.zero_()
        else:
            target.copy_(fresh)
        self._round[index] = True

    def _is_whole(self, fresh: torch.Tensor) -> bool:
        """Whether a gradient is all of its flat, and nobody else's: it becomes the buffer (a table's would be there twice)."""
        if len(self.flat.layout.slots) > 1 or fresh.numel() != self.flat.layout.padded_numel or self._mode.mute:
            return False
        storage = fresh.untyped_storage()
        alone = fresh.is_contiguous() and storage.nbytes() == fresh.nbytes and is_unshared(storage)
        return alone and fresh.dtype == (self.accumulate if self._mode.widen else self.flat.dtype)

    def _ensure_local(self) -> None:
        if self.local is None:
            self.local = self._empty(self.accumulate if self._mode.widen else self.flat.dtype)

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.flat.layout.padded_numel, dtype=dtype, device=self.flat.device)

    def _make_sum(self, accumulate: torch.dtype, local_dtype: torch.dtype, drops: bool) -> Sum:
        layout, device = self.flat.layout, self.flat.device
        numel = layout.shard_numel if layout.optim_sharded else layout.padded_numel
        if self._kept is not None and accumulate == local_dtype:
            part = self.flat.interval_of(self._kept) if layout.optim_sharded else self._kept
            return Sum(numel, accumulate, device, drops=False, held=part)
        moved = self.flat.homes.moved
        away = moved and self._mode.link is not None and layout.optim_sharded and self.partial is None
        drops = drops and layout.grad_sharded and not moved
        kept = Sum(numel, accumulate, torch.device("cpu") if away else device, drops)
        if not kept.drops:
            kept.tensor(None)
        return kept

    def _move(self, to: GradState) -> None:
        move(self.state, to, self.flat.layout.slots[0].name, self.flat.rank)
        self.state = to


@dataclass(frozen=True)
class _Places:
    """Where parameters lie in a flat, worked out once."""

    spans: tuple[tuple[int, int], ...]
    """First and last (excluded) element of each."""
    strided: tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
    """Shape, strides and first element of each."""
    gaps: tuple[tuple[int, int], ...]
    """What belongs to none."""

    @classmethod
    def of(cls, layout: FlatLayout) -> _Places:
        """The places of ``layout``."""
        spans = tuple((slot.start, slot.start + slot.numel) for slot in layout.slots)
        strided = tuple((slot.shape, contiguous_strides(slot.shape), slot.start) for slot in layout.slots)
        ends, starts = [0, *(end for _, end in spans)], [*(start for start, _ in spans), layout.padded_numel]
        gaps = tuple((end, start) for end, start in zip(ends, starts, strict=True) if start > end)
        return cls(spans, strided, gaps)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a tensor whose last dimension lies together."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
