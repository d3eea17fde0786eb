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
from shardledger.plan.plan import Plan
from shardledger.runtime.describe import owners
from shardledger.runtime.offload import Offload
from shardledger.runtime.parameters import FlatParameters, master_dtype
from shardledger.runtime.states import ParamState
from shardledger.runtime.unit import Unit
from shardledger.transport import Transport

Places = dict[str, list[tuple[nn.Module, str]]]
"""Every ``(module, attribute)`` of each parameter."""


@dataclass(frozen=True)
class Site:
    """What birth needs to know."""

    model: nn.Module
    plan: Plan
    layout: Layout
    transport: Transport
    device: torch.device
    offload: Offload | None = None
    """Where what does not rest on the device goes."""
    stands_for: str | None = None
    """Kind of device that ``device`` stands for in a dry run; None: itself."""

    @property
    def one_memory(self) -> bool:
        """Whether the device's memory is the host's."""
        return (self.stands_for or self.device.type) == "cpu"


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
            _materialise(site, places, unit_plan.parameters)
        flats = [_place_flat(site, number, places) for number in site.layout.numbers_of_unit(index)]
        unit = Unit(index, unit_plan, unit_module, flats, site.transport.rank)
        unit.move(ParamState.SHARDED if unit.sharded_flats else ParamState.FULL)
        units.append(unit)
    _place_buffers(site)
    return units


def _place_flat(site: Site, number: int, places: Places) -> FlatParameters:
    layout = site.layout.flats[number]
    parameters = [_parameter(places, slot.name) for slot in layout.slots]
    homes = None if site.offload is None else site.offload.homes[number]
    flat = FlatParameters(layout, parameters, site.transport.rank, site.device, homes)
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
    if site.offload is not None:
        site.offload.settle_in(number, flat)
    return flat


def _materialise(site: Site, places: Places, names: tuple[str, ...]) -> None:
    """Give meta parameters initial values on rank 0; elsewhere only an identity that can hold data.

    A module is drawn whole and once: what it holds of other units gets its values now, too.
    """
    modules = {id(m): m for name in names if _parameter(places, name).is_meta for m, _ in places[name]}
    canonical = {id(p): name for name in places for p in (_parameter(places, name),)}
    drawn = {canonical[id(p)] for m in modules.values() for p in m._parameters.values() if p is not None and p.is_meta}
    rank0 = site.transport.rank == 0
    for name in sorted(drawn):
        old = _parameter(places, name)
        values = torch.full((), _poison(old), dtype=old.dtype, device=site.device).expand(old.shape)
        fresh = nn.Parameter(values.clone() if rank0 else values, requires_grad=old.requires_grad)
        for module, attribute in places[name]:
            module._parameters[attribute] = fresh
    paths = {id(module): path for path, module in site.model.named_modules()}
    for key, module in modules.items():
        _draw(paths[key], module, site)
    if not rank0:
        return
    for name in sorted(drawn):
        if _untouched(_parameter(places, name)):
            module, attribute = places[name][0]
            raise _not_initialised(f"parameter {name!r}", module, attribute)


def _place_buffers(site: Site) -> None:
    for path, module in site.model.named_modules():
        if any(buffer is not None and buffer.is_meta for buffer in module._buffers.values()):
            _draw(path, module, site)
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            moved = buffer.to(site.device).contiguous()
            if site.transport.world > 1 and moved.numel():
                wire = moved.view(torch.uint8) if moved.dtype == torch.bool else moved
                site.transport.broadcast(wire, 0, f"buffer {_join(path, name)}")
            module._buffers[name] = moved


def _draw(path: str, module: nn.Module, site: Site) -> None:
    """Let one module initialise itself on rank 0; its meta buffers become real everywhere.

    Raises:
        PlanError: a meta buffer that the module leaves as it was.
    """
    meta = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
    for name in meta:
        buffer = module._buffers[name]
        assert buffer is not None
        module._buffers[name] = torch.full(buffer.shape, _poison(buffer), dtype=buffer.dtype, device=site.device)
    if site.transport.rank != 0:
        return
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
    for name in meta:
        buffer = module._buffers[name]
        assert buffer is not None
        if reset is None or _untouched(buffer):
            raise _not_initialised(f"buffer {_join(path, name)!r}", module, name)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _poison(tensor: torch.Tensor) -> float | int | bool:
    """A value that no initialisation leaves behind, as far as the dtype has one."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min


def _untouched(tensor: torch.Tensor) -> bool:
    """Whether any element (of a float), or every element (of an integer), still has the poison."""
    if not tensor.numel() or tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.detach().isnan().any())
    return tensor.dtype != torch.uint8 and bool((tensor == _poison(tensor)).all())


def _not_initialised(what: str, module: nn.Module, attribute: str) -> PlanError:
    owner = type(module).__name__
    return PlanError(
        f"{what} is on the meta device and {owner}.reset_parameters() does not initialise {owner}.{attribute}. Give "
        f"{owner} a reset_parameters() that does, or build the model on the CPU."
    )


def _parameter(places: Places, name: str) -> nn.Parameter:
    module, attribute = places[name][0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter
