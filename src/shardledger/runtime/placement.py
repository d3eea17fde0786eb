"""Birth of a sharded model: from a module on any device to units whose state lies where the layout says.

One unit at a time. Values come from rank 0: its module's, or, for a module on the meta device, what its modules'
``reset_parameters`` draw. Never is more than one unit held beside the final state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardledger.errors import PlanError
from shardledger.layout.build import Layout
from shardledger.layout.flat import FlatLayout
from shardledger.plan.plan import Plan
from shardledger.runtime.describe import owners
from shardledger.runtime.parameters import FlatParameters, master_dtype
from shardledger.runtime.states import ParamState
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport


@dataclass(frozen=True)
class Site:
    """What birth needs to know."""

    model: nn.Module
    plan: Plan
    layout: Layout
    transport: Transport
    device: torch.device


@torch.no_grad()
def place(site: Site) -> list[Unit]:
    """Turn the parameters of ``site.model`` into units, and bring its buffers to the device with rank 0's values.

    Raises:
        PlanError: a meta-device parameter or buffer that no ``reset_parameters`` initialises.
    """
    places = owners(site.model)
    modules = dict(site.model.named_modules())
    units = []
    for index, unit_plan in enumerate(site.plan.units):
        unit_module = modules[unit_plan.path]
        meta = [name for name in unit_plan.parameters if _parameter(places, name).is_meta]
        if meta:
            _materialise(site, places, unit_plan.parameters, draw=site.transport.rank == 0)
        flats = [_place_flat(site, layout, places) for layout in site.layout.of_unit(index)]
        unit = Unit(index, unit_plan, unit_module, flats, site.transport.rank)
        unit.move(ParamState.SHARDED if unit.sharded_flats else ParamState.FULL)
        units.append(unit)
    _place_buffers(site)
    return units


def _place_flat(site: Site, layout: FlatLayout, places: dict[str, list[tuple[nn.Module, str]]]) -> FlatParameters:
    parameters = [_parameter(places, slot.name) for slot in layout.slots]
    flat = FlatParameters(layout, parameters, site.transport.rank, site.device)
    keep = master_dtype(flat.dtype) if layout.trainable else flat.dtype
    label = site.plan.units[layout.unit].label
    direct = not layout.param_sharded and keep == flat.dtype
    if layout.param_sharded:
        flat.release_storage()
    initial: torch.Tensor | None = None
    if direct:
        initial = flat.full
    elif site.transport.rank == 0 or not layout.param_sharded:
        initial = torch.zeros(layout.padded_numel, dtype=keep, device=site.device)
    if site.transport.rank == 0:
        assert initial is not None
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            initial[slot.start : slot.start + slot.numel].copy_(parameter.detach().reshape(-1))
    if layout.param_sharded:
        shard = torch.empty(layout.shard_numel, dtype=keep, device=site.device)
        site.transport.scatter_from(0, initial, shard, label)
        flat.adopt_shard(shard)
    else:
        assert initial is not None
        site.transport.broadcast(initial, 0, label)
        flat.adopt_full(initial)
    return flat


def _materialise(
    site: Site, places: dict[str, list[tuple[nn.Module, str]]], names: tuple[str, ...], *, draw: bool
) -> None:
    """Give meta parameters memory on rank 0 and initial values; elsewhere only an identity that can hold data."""
    drawn: dict[int, nn.Module] = {}
    for name in names:
        old = _parameter(places, name)
        if not old.is_meta:
            continue
        shape = old.shape
        empty = torch.full((), float("nan") if old.is_floating_point() else 0, dtype=old.dtype, device=site.device)
        fresh = nn.Parameter(
            torch.full(shape, float("nan"), dtype=old.dtype, device=site.device) if draw else empty.expand(shape),
            requires_grad=old.requires_grad,
        )
        for module, attribute in places[name]:
            module._parameters[attribute] = fresh
            drawn[id(module)] = module
    if not draw:
        return
    for module in drawn.values():
        _materialise_buffers(module, site.device)
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    for name in names:
        value = _parameter(places, name)
        if value.numel() and value.is_floating_point() and bool(value.isnan().any()):
            module, attribute = places[name][0]
            raise PlanError(
                f"parameter {name!r} is on the meta device and {type(module).__name__}.reset_parameters does not "
                f"initialise {attribute!r}. Give {type(module).__name__} a reset_parameters() that does, or build the "
                f"model on the CPU."
            )


def _materialise_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            poison = float("nan") if buffer.is_floating_point() else 0
            module._buffers[name] = torch.full(buffer.shape, poison, dtype=buffer.dtype, device=device)


def _place_buffers(site: Site) -> None:
    for path, module in site.model.named_modules():
        meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if meta:
            _materialise_buffers(module, site.device)
            reset = getattr(module, "reset_parameters", None)
            if site.transport.rank == 0 and reset is not None and not module._parameters:
                reset()
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            moved = buffer.to(site.device).contiguous()
            full_name = f"{path}.{name}" if path else name
            if site.transport.world > 1 and moved.numel():
                wire = moved.view(torch.uint8) if moved.dtype == torch.bool else moved
                site.transport.broadcast(wire, 0, f"buffer {full_name}")
            if meta and moved.is_floating_point() and moved.numel() and bool(moved.isnan().all()):
                raise PlanError(
                    f"buffer {full_name!r} is on the meta device and {type(module).__name__} has no reset_parameters() "
                    f"that initialises it. Add one, or build the model on the CPU."
                )
            module._buffers[name] = moved


def _parameter(places: dict[str, list[tuple[nn.Module, str]]], name: str) -> nn.Parameter:
    module, attribute = places[name][0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter
