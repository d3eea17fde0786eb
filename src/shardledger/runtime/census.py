"""What the engine really holds on this rank, counted from live storages."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import torch

from shardledger.errors import ConfigError
from shardledger.ledger import OptimizerBytes
from shardledger.runtime.optimizer import Groups, Piece, Recipe, build_optimizer, needs_whole_parameters
from shardledger.runtime.released import is_away
from shardledger.runtime.unit import Unit


def state_census(units: Sequence[Unit], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of live storages in the memory that this rank computes in by category, each storage counted once."""
    device = next((flat.device.type for unit in units for flat in unit.flats), "cpu")  # the root may have none
    seen: set[int] = set()

    def count(tensors: Iterable[torch.Tensor]) -> int:
        return _count((t for t in tensors if t.device.type == device), seen)

    full = count(f.full for u in units for f in u.flats if not f.layout.param_sharded)
    same, wide = [], []
    for unit in units:
        for flat in unit.flats:
            for tensor in (flat.shard, flat.master):
                if tensor is not None:
                    apart = tensor.dtype != flat.dtype or tensor is flat.master and flat.homes.master is not None
                    (wide if apart else same).append(tensor)
    return {
        "params": full + count(same),
        "grads": count(t for u in units for g in u.gradients for t in (g.local, g.held_sum) if t is not None),
        "master": count(wide),
        "optimizer": count(
            t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)
        ),
    }


def transient_bytes(units: Sequence[Unit]) -> int:
    """Bytes of gathered parameters and unreduced gradients alive now, beside the states."""
    gathered = sum(f.full.untyped_storage().nbytes() for u in units for f in u.flats if f.layout.param_sharded)
    return gathered + pending_bytes(units)


def dropped_bytes(units: Sequence[Unit]) -> int:
    """Bytes of sums of gradients that are not in memory now, between the step and the next reduction."""
    return sum(g.dropped_bytes for u in units for g in u.gradients)


def pending_bytes(units: Sequence[Unit]) -> int:
    """Bytes of gradients on their way into a reduction; part of ``transient_bytes``, and of the grads of a census."""
    return sum(g.pending_bytes for u in units for g in u.gradients)


def probe_optimizer(optimizer: torch.optim.Optimizer) -> OptimizerBytes:
    """What the optimizer's class keeps per element and per piece, measured on two small parameters."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {k: v for k, v in optimizer.defaults.items() if k in accepted}
    held, sizes = [], ()
    for columns in (8, 16):
        parameter = torch.zeros(8, columns, requires_grad=True)  # 2-D: some classes take nothing else
        parameter.grad = torch.ones(8, columns)
        probe = type(optimizer)([parameter], **options)
        probe.step()
        held.append(_count((t for s in probe.state.values() for t in s.values() if isinstance(t, torch.Tensor)), set()))
        states = probe.state[parameter].values()
        sizes = tuple(t.itemsize for t in states if isinstance(t, torch.Tensor) and t.shape == parameter.shape)
    per_element = (held[1] - held[0]) // 64
    whole = needs_whole_parameters(type(optimizer))
    return OptimizerBytes(per_element, held[0] - 64 * per_element, whole, sizes)


def probe_states(recipe: Recipe, groups: Groups) -> dict[str, torch.dtype]:
    """States that the optimizer keeps for every element of an fp32 parameter, by name.

    Raises:
        ConfigError: its step counts in the param groups, so that it cannot be run on one part of them after another.
    """
    found: dict[str, torch.dtype] = {}
    for options, _ in groups:
        values = torch.zeros(8, 8, requires_grad=True)
        if isinstance(recipe, torch.optim.Optimizer):
            accepted = inspect.signature(type(recipe).__init__).parameters
            made = type(recipe)([values], **{k: v for k, v in options.items() if k in accepted and k != "params"})
        else:
            piece = Piece("probe", None, 0, values)  # type: ignore[arg-type]  # building needs the values alone
            made = build_optimizer(recipe, [(options, ["probe"])], [piece])
        before = {k: v for k, v in made.param_groups[0].items() if k != "params"}
        values.grad = torch.ones(8, 8)
        made.step()
        changed = [k for k, v in before.items() if made.param_groups[0][k] is not v]
        if changed:
            raise ConfigError(
                f"zero_optimization.offload_optimizer: a step of {type(made).__name__} changes {changed[0]!r} of its param "
                f"group, and offload steps the parameters of a group one part after the other. Keep such counts in the "
                f"state of parameters, as torch.optim does, or train without offload."
            )
        states = made.state.get(values, {})
        found |= {k: v.dtype for k, v in states.items() if isinstance(v, torch.Tensor) and v.shape == values.shape}
    return found


def probe_recipe(recipe: Recipe) -> OptimizerBytes:
    """The same before the optimizer exists: nothing of the user's is touched."""
    if isinstance(recipe, torch.optim.Optimizer):
        return probe_optimizer(recipe)
    values = torch.zeros(8, 8, requires_grad=True)
    piece = Piece("probe", None, 0, values)  # type: ignore[arg-type]  # building an optimizer needs the values alone
    return probe_optimizer(build_optimizer(recipe, [({}, ["probe"])], [piece]))


def _count(tensors: Iterable[torch.Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        if is_away(tensor):
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            total += storage.nbytes()
    return total
