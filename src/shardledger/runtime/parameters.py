"""The parameters of one flat: full, or only this rank's shard of them.

full      1-D [padded_numel]  compute dtype; the parameters are views of it. Its storage is empty while released.
shard     1-D [shard_numel]   what this rank keeps of it when PARAM is sharded: the fp32 masters, or, for a frozen
                              flat, the weights themselves
master    1-D                 fp32 weights that the optimizer updates: a shard when OPTIM is sharded, else all of
                              them; the same memory as the weights when those are fp32 themselves
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardledger.layout.flat import FlatLayout, Interval
from shardledger.runtime import released
from shardledger.runtime.describe import dtype_of

_CHUNK = 1 << 20
"""Elements that are compared at once, so that a comparison takes no memory to speak of."""


class FlatParameters:
    """Storage and views of one flat. Moves no bytes between ranks; ``Executor`` does."""

    def __init__(self, layout: FlatLayout, parameters: list[nn.Parameter], rank: int, device: torch.device) -> None:
        self.layout = layout
        self.parameters = parameters
        self.rank = rank
        self.device = device
        self.dtype = dtype_of(layout.dtype)
        self.master_dtype = master_dtype(self.dtype)
        self.full = torch.empty(layout.padded_numel, dtype=self.dtype, device=device)
        self.full[layout.numel :].zero_()
        self.views = [self.full[s.start : s.start + s.numel].view(s.shape) for s in layout.slots]
        self.shard: torch.Tensor | None = None
        self.master: torch.Tensor | None = None
        self._versions: list[int] = []
        """Of the parameters when they were exposed: who writes to them counts them up."""
        self._stand_ins = [released.placeholder(s.shape, self.dtype, device) for s in layout.slots]
        self._full_bytes = self.full.untyped_storage().nbytes()

    @property
    def resident(self) -> bool:
        """Whether the full parameters take memory now."""
        return self.layout.padded_numel == 0 or self.full.untyped_storage().nbytes() > 0

    @property
    def full_bytes(self) -> int:
        """Bytes of the full flat when it is gathered."""
        return self._full_bytes

    def expose(self) -> None:
        """Make the parameters views of the full flat."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            released.restore(parameter, view)
        self._versions = [parameter._version for parameter in self.parameters]

    def edited(self, *, thorough: bool) -> str | None:
        """Name of an exposed parameter that something has written to; its gathered copy is about to be dropped.

        ``thorough`` compares this rank's interval with its shard, and so finds writes through ``.data`` as well.
        """
        for parameter, slot, version in zip(self.parameters, self.layout.slots, self._versions, strict=True):
            if parameter._version != version:
                return slot.name
        if not thorough or self.shard is None or isinstance(self.full, FakeTensor):
            return None
        ours = self.interval_of(self.full)
        for piece in self.layout.pieces(self.rank):
            span = piece.in_shard
            for at in range(span.start, span.stop, _CHUNK):
                end = min(at + _CHUNK, span.stop)
                if not torch.equal(_bits(ours[at:end]), _bits(self.shard[at:end].to(self.dtype))):
                    return piece.name
        return None

    def release(self) -> None:
        """Free the full flat; only this rank's shard stays."""
        for parameter, slot, stand_in in zip(self.parameters, self.layout.slots, self._stand_ins, strict=True):
            released.release(parameter, slot.name, stand_in)
        self.full.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Give the full flat its memory back, this rank's interval filled from the shard, the rest undefined."""
        self.full.untyped_storage().resize_(self._full_bytes)
        if self.shard is not None:
            self.interval_of(self.full).copy_(self.shard)

    def forget(self) -> None:
        """Let go of all tensors; parameters that are released now have no values any more."""
        for parameter in self.parameters:
            released.abandon(parameter)
        self.full = self.full.new_empty(0)
        self.shard = self.master = None
        self.parameters, self.views, self._stand_ins = [], [], []

    def release_storage(self) -> None:
        """Free the full flat before its parameters were ever exposed."""
        self.full.untyped_storage().resize_(0)

    def adopt_shard(self, shard: torch.Tensor) -> None:
        """Take this rank's initial values; the parameters become released ones."""
        self.shard = shard
        self.master = shard if self.layout.trainable else None
        self.release()

    def adopt_full(self, initial: torch.Tensor) -> None:
        """Take all initial values, in the masters' dtype when trainable; the parameters become views of the full flat."""
        if initial is not self.full:
            self.full.copy_(initial)
        self.expose()
        if not self.layout.trainable:
            return
        if self.master_dtype == self.dtype:
            self.master = self.interval_of(self.full) if self.layout.optim_sharded else self.full
        else:
            self.master = self.interval_of(initial).clone() if self.layout.optim_sharded else initial

    def edited_masters(self) -> list[str]:
        """Names of resident 16-bit parameters whose weights are not what this rank's masters round to."""
        if self.master is None or self.layout.param_sharded or self.dtype == self.master_dtype:
            return []
        if isinstance(self.full, FakeTensor):
            return []
        start, found = self.master_interval.start, []
        for piece in self.layout.pieces_in(self.master_interval):
            for at in range(piece.in_shard.start, piece.in_shard.stop, _CHUNK):
                end = min(at + _CHUNK, piece.in_shard.stop)
                rounded = self.master[at:end].to(self.dtype)
                if not torch.equal(_bits(self.full[start + at : start + end]), _bits(rounded)):
                    found.append(piece.name)
                    break
        return found

    def reload(self, values: torch.Tensor) -> None:
        """Take new values for everything this rank keeps: this rank's interval where PARAM is sharded, else the full
        flat, in the masters' dtype (the weights' own when frozen)."""
        if self.shard is not None:
            self.shard.copy_(values)
            return
        self.full.copy_(values)
        if self.master is not None:
            self.master.copy_(self.interval_of(values) if self.layout.optim_sharded else values)

    def take_over(self, name: str) -> None:
        """Bring the values that one parameter has in the full flat into this rank's permanent tensors.

        A master keeps its fp32 digits where the 16-bit weight was not touched.
        """
        target = self.master if self.master is not None else self.shard
        if target is None:
            return
        interval = self.master_interval
        for piece in self.layout.pieces_in(interval):
            if piece.name != name:
                continue
            kept = target[piece.in_shard.start : piece.in_shard.stop]
            start = interval.start + piece.in_shard.start
            fresh = self.full[start : start + kept.numel()]
            if kept.data_ptr() != fresh.data_ptr():
                kept.copy_(torch.where(kept.to(fresh.dtype) == fresh, kept, fresh.to(kept.dtype)))

    def publish(self) -> None:
        """Copy updated masters into the full flat (this rank's interval when OPTIM is sharded)."""
        if self.master is None or self.layout.param_sharded or self.dtype == self.master_dtype:
            return
        target = self.interval_of(self.full) if self.layout.optim_sharded else self.full
        target.copy_(self.master)

    def interval_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's interval of a full-size flat, as a view."""
        mine = self.layout.shard(self.rank)
        return flat[mine.start : mine.stop]

    @property
    def master_interval(self) -> Interval:
        """Which elements of the flat the masters are."""
        flat = self.layout
        if flat.param_sharded or flat.optim_sharded:
            return flat.shard(self.rank)
        return Interval(0, flat.padded_numel)


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of masters and moments: fp32, or the weights' own when that is wider."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # a NaN equals no NaN
