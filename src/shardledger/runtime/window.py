"""The gradients of an unfinished accumulation window: what a checkpoint keeps of them, and how a run goes on from it.

Three kinds, by the role their portions have:

gradient.sum      summed over ranks and micro-batches: each element once, on the rank in whose shard it lies
gradient.tree4    a partial sum of 4 micro-batches over all ranks (reproducible mode), spread in the same way
gradient.rank1    what only rank 1 has seen (stages 0 and 1, ``no_sync``): whole parameters

On as many ranks, with the same plan, each kind goes back to where it was, so that not a bit of the step changes. Elsewhere
all are added up to one sum: the order of additions is another, so the step is the same within rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardledger.errors import EngineStateError
from shardledger.layout.flat import Interval
from shardledger.layout.portion import Portion, StateSource
from shardledger.runtime.assemble import Parts
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.gradients import FlatGradients
from shardledger.runtime.states import GradState
from shardledger.runtime.treesum import TreeSum
from shardledger.runtime.unit import Unit

SUM, TREE, RANK = "gradient.sum", "gradient.tree", "gradient.rank"
Window = Mapping[str, Any]
"""One rank's position in a window, as JSON has it."""


def check_counted(parts: Parts, doing: str) -> None:
    """Raise EngineStateError between a backward pass and the ``step`` that counts it."""
    pending = any(g.state is not GradState.EMPTY for unit in parts.units for g in unit.gradients)
    if pending and parts.backward_at == parts.progress.micro_steps:
        raise EngineStateError(
            f"{doing} was called between engine.backward(loss) and engine.step(), so the micro-batch is half done: call "
            f"it after engine.step(), which counts the micro-batch, or call engine.zero_grad() first."
        )


def position(parts: Parts, loss_scale: float) -> Window | None:
    """This rank's position in the window; None at its beginning."""
    progress = parts.progress
    if not progress.window:
        return None
    present = [
        slot.name
        for unit in parts.units
        for g in unit.gradients
        for slot, there in zip(g.flat.layout.slots, g.present, strict=True)
        if there
    ]
    return {
        "micro_batches": progress.window,
        "micro_batch_samples": parts.plan.step.micro_batch,
        "weight": progress.window_weight,
        "weighted": progress.weighted,
        "loss_scale": loss_scale,
        "unsynced": parts.unsynced,
        "held_back": parts.held_back,
        "present": present,
    }


def held_gradients(unit: Unit, rank: int) -> Iterator[tuple[Portion, torch.Tensor]]:
    """What this rank writes of a unit's gradients, as views."""
    for g in unit.gradients:
        g.settle()
        sums = [(SUM, g.reduced_shard())] if g.has_sum and g.partial is None else []
        if g.partial is not None:
            sums = [(f"{TREE}{count}", part) for count, part in g.partial.parts]
        for role, shard in sums:
            for piece in g.flat.layout.pieces(g.flat.rank):
                yield Portion(piece.name, role, piece.in_parameter), shard[piece.in_shard.start : piece.in_shard.stop]
        for index, slot in enumerate(g.flat.layout.slots):
            local = g.unreduced(index)
            if local is not None and slot.numel:
                yield Portion(slot.name, f"{RANK}{rank}", Interval(0, slot.numel)), local


def position_here(parts: Parts, windows: Sequence[Window], *, same: bool) -> int:
    """Micro-batches that each rank has behind it when it goes on from ``windows``, one for each saved rank.

    Raises:
        EngineStateError: the samples of the window are no whole number of micro-batches here, or the tree of the
            reproducible mode cannot be continued.
    """
    first = windows[0]
    samples = first["micro_batches"] * first["micro_batch_samples"] * len(windows)
    each = parts.plan.step.micro_batch * parts.plan.world
    if samples % each:
        raise EngineStateError(
            f"the checkpoint was saved inside an accumulation window, after {samples} of its samples; "
            f"{parts.plan.world} ranks take {each} at once, so they cannot go on there. Load it on {len(windows)} ranks, "
            f"with another micro-batch, or take a checkpoint that was saved after an optimizer step."
        )
    if (
        parts.plan.reproducible
        and not same
        and (len(windows), first["micro_batch_samples"])
        != (
            parts.plan.world,
            parts.plan.step.micro_batch,
        )
    ):
        raise EngineStateError(
            f"the checkpoint was saved inside an accumulation window of {len(windows)} ranks, and shardledger.reproducible "
            f"adds all micro-batches of a step in one tree, which {parts.plan.world} ranks cannot go on with. Load it on "
            f"{len(windows)} ranks, or take a checkpoint that was saved after an optimizer step."
        )
    return int(samples // each)


@torch.no_grad()
def take_over(parts: Parts, windows: Sequence[Window], source: StateSource, *, same: bool, loss_scale: float) -> None:
    """Go on in a saved window. No gradients may be held. ``same``: as many ranks, with the same plan, saved it.

    Raises:
        EngineStateError: as ``position_here``.
    """
    progress, rank = parts.progress, parts.transport.rank
    count = position_here(parts, windows, same=same)
    first = windows[0]
    factor = loss_scale / first["loss_scale"]
    if not first["weighted"]:  # averages over micro-batches of another size weigh by their samples
        factor *= first["micro_batch_samples"] / parts.plan.step.micro_batch
    same = same and factor == 1.0
    own = windows[rank] if same else first
    present = set(own["present"]) if same else {name for window in windows for name in window["present"]}
    for unit in parts.units:
        for g in unit.gradients:
            _take_over_flat(g, source, present, rank if same else None, factor)
    # Where the sum lies in the memory of the local gradients, those that still come must be as wide.
    parts.mode.widen = any(g.has_sum and g.keeps_local for unit in parts.units for g in unit.gradients)
    progress.window, progress.weighted = count, first["weighted"]
    if same:
        progress.window_weight = own["weight"]
    elif first["weighted"]:
        progress.window_weight = sum(window["weight"] for window in windows) if rank == 0 else 0.0
    else:
        progress.window_weight = float(count)
    parts.unsynced = bool(own["unsynced"]) if same else False
    parts.held_back = bool(own["held_back"]) if same else False


def _take_over_flat(g: FlatGradients, source: StateSource, present: set[str], rank: int | None, factor: float) -> None:
    slots = g.flat.layout.slots
    stored = {slot.name: source.gradients(slot.name) for slot in slots}
    roles = sorted({role for kinds in stored.values() for role in kinds})
    sums = [role for role in roles if not role.startswith(RANK)]
    if rank is None:
        if roles:
            _add_up(g, source, stored, factor)
    elif g.partial is not None:
        trees = sorted((int(role.removeprefix(TREE)) for role in sums), reverse=True)
        g.partial = TreeSum()
        for count in trees:
            shard = torch.zeros_like(g.reduced_shard())
            _read(g, source, f"{TREE}{count}", stored, shard, Interval(0, 0))
            g.partial.parts.append((count, shard))
    elif sums:
        _add_up(g, source, {name: {SUM: kinds[SUM]} for name, kinds in stored.items() if SUM in kinds}, 1.0)
    own = f"{RANK}{rank}"
    rounds = [rank is not None and own in stored[slot.name] for slot in slots]
    dtypes = {stored[slot.name][own] for slot, there in zip(slots, rounds, strict=True) if there}
    local = g.resume(
        [slot.name in present for slot in slots],
        rounds,
        has_sum=bool(sums) if rank is not None else bool(roles),
        dtype=dtype_of(dtypes.pop()) if dtypes else None,
    )
    for slot, there in zip(slots, rounds, strict=True):
        if there and local is not None:
            out = local[slot.start : slot.start + slot.numel]
            source.read_state(slot.name, own, Interval(0, slot.numel), out)


def _add_up(g: FlatGradients, source: StateSource, stored: Mapping[str, Mapping[str, str]], factor: float) -> None:
    """Everything that is stored, as one sum over ranks and micro-batches."""
    whole = not g.flat.layout.optim_sharded and g.partial is None
    target = torch.zeros_like(g.reduced) if whole else torch.zeros_like(g.reduced_shard())
    interval = Interval(0, g.flat.layout.padded_numel) if whole else g.flat.layout.shard(g.flat.rank)
    part = torch.zeros_like(target)
    for role in sorted({role for kinds in stored.values() for role in kinds}):
        part.zero_()
        _read(g, source, role, stored, part, interval)
        target.add_(part)
    if factor != 1.0:
        target.mul_(factor)
    if g.partial is not None:
        g.restart(target)
    else:
        (g.reduced if whole else g.reduced_shard()).copy_(target)


def _read(
    g: FlatGradients,
    source: StateSource,
    role: str,
    stored: Mapping[str, Mapping[str, str]],
    out: torch.Tensor,
    interval: Interval,
) -> None:
    """Read one role of the parameters in an interval of the flat; empty: this rank's shard."""
    interval = interval if interval.numel else g.flat.layout.shard(g.flat.rank)
    for piece in g.flat.layout.pieces_in(interval):
        if role in stored.get(piece.name, {}):
            source.read_state(piece.name, role, piece.in_parameter, out[piece.in_shard.start : piece.in_shard.stop])
