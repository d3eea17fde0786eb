"""Full weights from their shards: one unit at a time, on rank 0 or on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.runtime.assemble import Parts
from shardledger.runtime.parameters import FlatParameters
from shardledger.transport import Transport


@torch.no_grad()
def full_state_dict(module: nn.Module, parts: Parts, *, all_ranks: bool) -> dict[str, Any]:
    """The keys of ``module.state_dict()`` with whole CPU tensors; collective.

    Weights come from the fp32 masters, frozen 16-bit weights are widened to fp32. Tied parameters are one tensor under
    all their names. Ranks other than 0 get ``{}`` unless ``all_ranks``.
    """
    transport = parts.transport
    wanted = all_ranks or transport.rank == 0
    values: dict[int, torch.Tensor] = {}
    with _saying(transport, "state_dict"):
        for unit in parts.units:
            for flat in unit.flats:
                with parts.at_hand([flat]):
                    whole = full_values(flat, transport, all_ranks=all_ranks, label=unit.label)
                if whole is None:
                    continue
                for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                    part = whole[slot.start : slot.start + slot.numel].view(slot.shape)
                    values[id(parameter)] = part.to("cpu", copy=True)
                del whole
    return dict(_entries(module, values)) if wanted else {}


@contextmanager
def _saying(transport: Transport, call: str) -> Iterator[None]:
    """Messages about a rank that does not come say which call it missed: it is a habit to save on rank 0 alone."""
    before = transport.where
    transport.where = f"{before.rpartition(', ')[0]}, {call} (every rank must call it)".removeprefix(", ")
    yield
    transport.where = before


def full_values(
    flat: FlatParameters, transport: Transport, *, all_ranks: bool, label: str, widen: bool = True
) -> torch.Tensor | None:
    """The whole flat, masters where there are some, 1-D [padded_numel]; None on ranks that do not get it."""
    source = flat.master if flat.master is not None else flat.shard
    if source is None:
        return _widen(flat.full) if widen else flat.full.clone()
    if source.numel() == flat.layout.padded_numel:
        return _widen(source) if widen else source.clone()
    source = source.to(flat.device)
    receives = all_ranks or transport.rank == 0
    whole = source.new_empty(flat.layout.padded_numel) if receives else None
    if all_ranks:
        assert whole is not None
        flat.interval_of(whole).copy_(source)
        transport.all_gather(whole, label).wait()
    else:
        transport.gather_to(0, whole, source, label)
    return _widen(whole) if whole is not None and widen else whole


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


@torch.no_grad()
def load_full_state_dict(module: nn.Module, parts: Parts, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load rank 0's whole tensors into masters, weights and buffers of all ranks; collective.

    Raises:
        EngineStateError: on all ranks; keys are missing or unexpected (``strict``), or have another shape.
    """
    transport = parts.transport
    wrong = _mismatches(module, state, strict=strict) if transport.rank == 0 else []
    with _saying(transport, "load_state_dict"):
        failed = transport.exchange(torch.tensor([float(len(wrong))], dtype=torch.float64), "check of a state dict")
    if failed[0, 0] > 0:
        raise EngineStateError(
            "load_state_dict: "
            + ("; ".join(wrong) or f"rank 0 found {int(failed[0, 0])} keys that do not fit the model")
        )
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False) if name in state}
    for unit in parts.units:
        for flat in unit.flats:
            with parts.at_hand([flat], write=True):
                _load_flat(flat, unit.label, transport, state, names)
    for name, buffer in module.named_buffers():
        if transport.rank == 0 and name in state:
            buffer.copy_(state[name])
        if buffer.numel():
            transport.broadcast(buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer, 0, f"buffer {name}")


def _load_flat(
    flat: FlatParameters, label: str, transport: Transport, state: Mapping[str, Any], names: Mapping[int, str]
) -> None:
    """Rank 0's values of ``names`` (``id`` of a parameter to its key) to all ranks; the rest stays."""
    whole = full_values(flat, transport, all_ranks=False, label=label, widen=False)
    if transport.rank == 0:
        assert whole is not None
        for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
            if id(parameter) in names:
                whole[slot.start : slot.start + slot.numel].copy_(state[names[id(parameter)]].reshape(-1))
    kept = flat.master if flat.master is not None else flat.shard if flat.shard is not None else flat.full
    if flat.shard is not None:
        part = torch.empty(flat.layout.shard_numel, dtype=kept.dtype, device=flat.device)
        transport.scatter_from(0, whole, part, label)
    else:
        new = torch.empty(flat.layout.padded_numel, dtype=kept.dtype, device=flat.device)
        part = whole.to(flat.device) if whole is not None else new
        transport.broadcast(part, 0, label)
    flat.reload(part)


def _mismatches(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> list[str]:
    expected = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    transient = {
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        for name in child._non_persistent_buffers_set
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in {**expected, **buffers}.items() if name not in transient}
    wrong = [
        f"{name!r} has shape {tuple(state[name].shape)}, the model wants {shape}"
        for name, shape in shapes.items()
        if name in state and tuple(state[name].shape) != shape
    ]
    if strict:
        wrong += [f"{name!r} {shape} is missing" for name, shape in shapes.items() if name not in state]
        wrong += [
            f"{name!r} is unexpected" for name in state if name not in shapes and not name.endswith("_extra_state")
        ]
    return wrong
