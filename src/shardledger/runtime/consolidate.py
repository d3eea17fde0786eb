"""Full weights from their shards: one unit at a time, on rank 0 or on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport


@torch.no_grad()
def full_state_dict(
    module: nn.Module, units: Sequence[Unit], transport: Transport, *, all_ranks: bool
) -> dict[str, Any]:
    """The keys of ``module.state_dict()`` with whole CPU tensors; collective.

    Weights come from the fp32 masters, frozen 16-bit weights are widened to fp32. Tied parameters are one tensor under
    all their names. Ranks other than 0 get ``{}`` unless ``all_ranks``.
    """
    wanted = all_ranks or transport.rank == 0
    values: dict[int, torch.Tensor] = {}
    for unit in units:
        for flat in unit.flats:
            whole = full_values(flat, transport, all_ranks=all_ranks, label=unit.label)
            if whole is None:
                continue
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                part = whole[slot.start : slot.start + slot.numel].view(slot.shape)
                values[id(parameter)] = part.to("cpu", copy=True)
            del whole
    return dict(_entries(module, values)) if wanted else {}


def full_values(flat: FlatParameters, transport: Transport, *, all_ranks: bool, label: str) -> torch.Tensor | None:
    """The whole flat, masters where there are some, 1-D [padded_numel]; None on ranks that do not get it."""
    source = flat.master if flat.master is not None else flat.shard
    if source is None:
        return _widen(flat.full)
    if source.numel() == flat.layout.padded_numel:
        return _widen(source)
    receives = all_ranks or transport.rank == 0
    whole = source.new_empty(flat.layout.padded_numel) if receives else None
    if all_ranks:
        assert whole is not None
        flat.interval_of(whole).copy_(source)
        transport.all_gather(whole, label).wait()
    else:
        transport.gather_to(0, whole, source, label)
    return _widen(whole) if whole is not None else None


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _entries(module: nn.Module, values: dict[int, torch.Tensor], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and order of ``state_dict``: own parameters, own persistent buffers, extra state, then children."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield prefix + name, values[id(parameter)]
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer.detach().to("cpu", copy=True)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield prefix + "_extra_state", module.get_extra_state()
    for name, child in module._modules.items():
        if child is not None:
            yield from _entries(child, values, f"{prefix}{name}.")
