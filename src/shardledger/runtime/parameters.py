"""The parameters of one flat: full, or only this rank's shard of them.

full      1-D [padded_numel]  compute dtype; the parameters are views of it. Its storage is empty while released.
shard     1-D [shard_numel]   what this rank keeps of it when PARAM is sharded: the fp32 masters, or, for a frozen
                              flat and where masters rest elsewhere, weights in the compute dtype
master    1-D                 fp32 weights that the optimizer updates: a shard when OPTIM is sharded, else all of
                              them; the same memory as the weights when those are fp32 themselves and in one place

Shard and master are None while they rest on disk (see ``offload``).
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from shardledger.layout.flat import FlatLayout, Interval
from shardledger.layout.homes import FlatHomes
from shardledger.plan.roles import Home
from shardledger.runtime import released
from shardledger.runtime.describe import dtype_of

_LEAST_COMPARED, _MOST_COMPARED = 1 << 14, 1 << 20
"""Elements that are compared at once: a sixty-fourth within these bounds, so that it takes no memory to speak of."""


class FlatParameters:
    """Storage and views of one flat. Moves no bytes between ranks; ``Executor`` does."""

    def __init__(
        self,
        layout: FlatLayout,
        parameters: list[nn.Parameter],
        rank: int,
        device: torch.device,
        homes: FlatHomes | None = None,
    ) -> None:
        self.layout = layout
        self.parameters = parameters
        self.rank = rank
        self.device = device
        self.homes = homes or FlatHomes()
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
            span = slice(piece.in_shard.start, piece.in_shard.stop)
            if not _same(ours[span], self.shard[span]):
                return piece.name
        return None

    def release(self) -> None:
        """Free the full flat; only this rank's shard stays."""
        for parameter, slot, stand_in in zip(self.parameters, self.layout.slots, self._stand_ins, strict=True):
            released.release(parameter, slot.name, stand_in)
        self.full.untyped_storage().resize_(0)

    def allocate(self) -> None:
        """Give the full flat its memory back, undefined."""
        self.full.untyped_storage().resize_(self._full_bytes)

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

    def adopt_shard(self, values: torch.Tensor) -> None:
        """Take this rank's initial values, in the masters' dtype when trainable; the parameters become released ones."""
        homes = self.homes
        if homes.master is None:
            self.shard = self._at(homes.shard, values)
            self.master = self.shard if self.layout.trainable else None
        else:
            self.shard = self._at(homes.shard, values.to(self.dtype, copy=True))
            self.master = self._at(homes.master, values)
        self.release()

    def adopt_full(self, initial: torch.Tensor) -> None:
        """Take all initial values, in the masters' dtype when trainable; the parameters become views of the full flat."""
        if initial is not self.full:
            self.full.copy_(initial)
        self.expose()
        if not self.layout.trainable:
            return
        own = self.interval_of(initial) if self.layout.optim_sharded else initial
        home = self.homes.master
        if home is not None:
            self.master = own.to(self.tier(home), copy=True)
        elif self.master_dtype == self.dtype:
            self.master = self.interval_of(self.full) if self.layout.optim_sharded else self.full
        else:
            self.master = own.clone() if self.layout.optim_sharded else initial

    def tier(self, home: Home) -> torch.device:
        """Where tensors of a home are while they are at hand."""
        return self.device if home is Home.DEVICE else torch.device("cpu")

    def _at(self, home: Home, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.tier(home))

    @property
    def shard_follows(self) -> bool:
        """Whether the shard is a copy of the masters that must be made anew when they change."""
        return self.layout.param_sharded and self.homes.master is not None

    def edited_masters(self) -> list[str]:
        """Names of resident parameters whose weights are not what this rank's masters, which are at hand, round to."""
        if self.master is None or self.layout.param_sharded or self.master_is_weights:
            return []
        if isinstance(self.full, FakeTensor):
            return []
        start, found = self.master_interval.start, []
        for piece in self.layout.pieces_in(self.master_interval):
            at, end = piece.in_shard.start, piece.in_shard.stop
            if not _same(self.full[start + at : start + end], self.master[at:end]):
                found.append(piece.name)
        return found

    def reload(self, values: torch.Tensor) -> None:
        """Take new values for everything this rank keeps: this rank's interval where PARAM is sharded, else the full
        flat, in the masters' dtype (the weights' own when frozen)."""
        if self.shard is not None:
            self.shard.copy_(values)
        else:
            self.full.copy_(values)
        if self.master is not None and self.master is not self.shard:
            whole = self.shard is not None or not self.layout.optim_sharded
            self.master.copy_(values if whole else self.interval_of(values))

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
                fresh = fresh.to(kept.device)
                kept.copy_(torch.where(kept.to(fresh.dtype) == fresh, kept, fresh.to(kept.dtype)))
        self.refresh()

    def refresh(self) -> None:
        """Copy the masters into the shard that follows them; both are at hand."""
        if self.shard_follows and self.shard is not None and self.master is not None:
            self.shard.copy_(self.master)

    def publish(self) -> None:
        """Copy updated masters into the full flat (this rank's interval when OPTIM is sharded)."""
        if self.master is None or self.layout.param_sharded or self.master_is_weights:
            return
        target = self.interval_of(self.full) if self.layout.optim_sharded else self.full
        target.copy_(self.master)

    @property
    def master_is_weights(self) -> bool:
        """Whether masters and weights are the same memory."""
        return self.homes.master is None and self.dtype == self.master_dtype

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


def _same(weights: torch.Tensor, kept: torch.Tensor) -> bool:
    """Whether weights are bit for bit what ``kept`` rounds to; a NaN equals itself."""
    step = min(_MOST_COMPARED, max(_LEAST_COMPARED, weights.numel() // 64))
    for now, then in zip(weights.split(step), kept.split(step), strict=True):
        rounded = then.to(weights.device, weights.dtype)
        if not torch.equal(now.view(torch.uint8), rounded.view(torch.uint8)):
            return False
    return True
