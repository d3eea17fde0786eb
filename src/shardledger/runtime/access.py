"""Weights and gradients by parameter, whole or this rank's part of them, at every stage. States: ``access_states``.

Names and meaning are DeepSpeed's. Whole values have the parameter's shape; local ones are the elements that this rank's
optimizer updates, 1-D: all of them at stage 0, none where the rank holds no part. All values are copies on the
parameter's device in fp32 (or the weights' own dtype where that is wider). Call whole reads and writes on every rank.
"""

from __future__ import annotations

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.layout.flat import Interval
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.reach import Reach, reach
from shardledger.runtime.states import GradState, ParamState
from shardledger.transport import ReduceHow

# --- weights -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """The master weights; collective where they are sharded (stages 1 to 3).

    Raises:
        EngineStateError: a frozen or foreign parameter, or a backward pass is running.
    """
    place = reach(param, "reading the fp32 value")
    if place.spread:
        place.agree()
    with place.at_hand():
        part = place.master().to(place.flat.device, copy=True)
    return (place.collect(part) if place.spread else part).view(place.slot.shape)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the master weights, and with them the weights that every rank computes with; collective.

    Raises:
        EngineStateError: a frozen or foreign parameter, a wrong shape, a backward pass is running, or the parameter is
            gathered.
        RanksDisagreeError: ranks pass different values.
    """
    place = reach(param, "setting the fp32 value")
    place.agree(value=value)
    fresh = place.checked(value, place.slot.shape)
    _check_released(place)
    with place.at_hand(write=True):
        place.master().copy_(fresh.reshape(-1)[place.mine.start : place.mine.stop])
        place.flat.refresh()
    if not place.flat.layout.param_sharded:
        place.flat.views[place.index].copy_(fresh)


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor:
    """This rank's part of the master weights, 1-D; empty when it has none.

    Raises:
        EngineStateError: a frozen or foreign parameter, or a backward pass is running.
    """
    place = reach(param, "reading this rank's part of the fp32 value")
    with place.at_hand():
        return place.master().to(place.flat.device, copy=True)


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part of the master weights (1-D).

    Collective wherever every rank computes with a copy of the whole, so everywhere except for the sharded parameters of
    stage 3.

    Raises:
        EngineStateError: as for ``safe_set_full_fp32_param``, on all ranks.
        RanksDisagreeError: at stage 0, where the part is the whole, ranks pass different values.
    """
    place = reach(param, "setting this rank's part of the fp32 value")
    sharded = place.flat.layout.param_sharded
    wrong = isinstance(value, torch.Tensor) and tuple(value.shape) != (place.mine.numel,)
    rows = [] if sharded else place.agree(float(wrong), value=None if place.spread else value)
    fresh = place.checked(value, (place.mine.numel,))
    refused = [rank for rank, row in enumerate(rows) if row[0]]
    if refused:
        raise place.error(f"ranks {refused} passed a wrong shape, so it was set on no rank. Pass their own part there")
    _check_released(place)
    with place.at_hand(write=True):
        place.master().copy_(fresh)
        place.flat.refresh()
    if not sharded:
        whole = place.collect(fresh) if place.spread else fresh
        place.flat.views[place.index].copy_(whole.view(place.slot.shape))


def _check_released(place: Reach) -> None:
    if place.flat.layout.param_sharded and place.unit.state is not ParamState.SHARDED:
        raise place.error(
            "it is gathered now, and its next release would drop the change. Edit the parameter itself inside "
            "GatheredParameters(..., modifier_rank=...), or set the value after the block"
        )


# --- gradients ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The gradient of this accumulation window so far, between a backward pass and the step; collective.

    It is what the step would use if it came now: averaged over ranks and micro-batches, unscaled, not clipped. Gradients
    that ranks have not added up yet (stages 0 and 1 inside a window, ``no_sync``) are added up for it. None when no rank
    has a gradient of this parameter.

    Raises:
        EngineStateError: a frozen or foreign parameter, a backward pass is running, or none has run since the last step.
    """
    place = reach(param, "reading the gradient")
    pending, present, divisor = _agree_on_gradient(place)
    if not present:
        return None
    gradients, shape = place.gradients, place.slot.shape
    total = torch.zeros(place.slot.numel, dtype=place.flat.master_dtype, device=place.flat.device)
    if gradients.has_sum:
        total += _whole_sum(place)
    if pending:
        total += _sum_over_ranks(place)
    return total.mul_(1 / divisor if divisor else 0.0).view(shape)


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace the gradient of this accumulation window so far by ``value``, averaged as ``safe_get_full_grad`` gives it.

    Collective, between a backward pass and the step. Inside a window at stages 0 and 1, and after ``no_sync``, the
    gradients of the whole model are reduced first.

    Raises:
        EngineStateError: as for ``safe_get_full_grad``, or a wrong shape.
        RanksDisagreeError: ranks pass different values.
    """
    place = reach(param, "setting the gradient")
    pending, _, divisor = _agree_on_gradient(place, value)
    fresh = place.checked(value, place.slot.shape).reshape(-1) * divisor
    gradients = place.gradients
    if pending or not gradients.has_sum:
        _reduce_now(place)
    mine = place.in_shard_of(place.flat.rank)
    _write_sum(place, fresh[mine.start : mine.stop])
    if gradients.partial is None and not place.spread:
        place.within(gradients.reduced, 0, Interval(0, place.slot.numel)).copy_(fresh)


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor:
    """This rank's part of ``safe_get_full_grad``, 1-D; empty when it has none, zeros where no rank had a gradient.

    Raises:
        EngineStateError: as for ``safe_get_full_grad``, or other ranks would be needed for it.
    """
    place = reach(param, "reading this rank's part of the gradient")
    divisor = _local_divisor(place)
    gradients = place.gradients
    part = place.in_shard(gradients.sum_so_far()) if place.spread else _whole_sum(place)
    return part.to(place.flat.device, place.flat.master_dtype, copy=True).mul_(1 / divisor if divisor else 0.0)


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Replace this rank's part (1-D) of the gradient of this accumulation window so far.

    At stage 0 the part is the whole, and every rank must pass the same.

    Raises:
        EngineStateError: as for ``safe_get_local_grad``, or a wrong shape.
    """
    place = reach(param, "setting this rank's part of the gradient")
    divisor = _local_divisor(place)
    fresh = place.checked(value, (place.mine.numel,)) * divisor
    if place.spread:
        _write_sum(place, fresh)
    else:
        place.within(place.gradients.reduced, 0, place.mine).copy_(fresh)
        _announce_gradient(place)


def _agree_on_gradient(place: Reach, value: object = None) -> tuple[bool, bool, float]:
    """Whether any rank has an unreduced gradient of the flat, or any at all of the parameter; and the divisor."""
    place.parts.executor.settle_reductions()
    gradients = place.gradients
    rows = place.agree(
        float(_have_gradients(place)),
        float(gradients.state is GradState.PENDING),
        float(gradients.present[place.index]),
        _weight(place),
        value=value,
    )
    if not any(row[0] for row in rows):
        raise _no_gradients(place)
    divisor = place.stepper.divisor(sum(row[3] for row in rows))
    return any(row[1] for row in rows), any(row[2] for row in rows), divisor


def _local_divisor(place: Reach) -> float:
    parts = place.parts
    if parts.progress.weighted:
        raise place.error(
            "the micro-batches of this window have denominators, and those of the other ranks are not known here. Use "
            "the function for the full gradient, on all ranks"
        )
    if not _have_gradients(place):
        raise _no_gradients(place)
    parts.executor.settle_reductions()
    gradients = place.gradients
    reduced_late = parts.unsynced and (gradients.keeps_local or parts.held_back)
    folded_late = gradients.partial is not None and not place.spread  # reproducible mode at stage 0
    if reduced_late or folded_late or not gradients.has_sum:
        raise place.error(
            "it has not been added up over ranks yet (stages 0 and 1 do that at the last micro-batch of a window, and "
            "no_sync later). Use the function for the full gradient, on all ranks"
        )
    return place.stepper.divisor(_weight(place) * parts.transport.world)


def _have_gradients(place: Reach) -> bool:
    return any(g.state is not GradState.EMPTY for unit in place.parts.units for g in unit.gradients)


def _no_gradients(place: Reach) -> EngineStateError:
    return place.error(
        "there are no gradients now: they exist from a backward pass to the step that uses them. Call it after "
        "engine.backward(loss), before engine.step()"
    )


def _weight(place: Reach) -> float:
    """Weight of this rank's micro-batches whose gradients are in the window, the one under way included."""
    parts, progress = place.parts, place.parts.progress
    under_way = parts.backward_at == progress.micro_steps
    current = 1.0 if progress.weight is None else progress.weight
    return progress.window_weight + (current if under_way else 0.0)


def _whole_sum(place: Reach) -> torch.Tensor:
    """What has been reduced, 1-D; collective where it is spread over ranks."""
    gradients = place.gradients
    if not place.spread and gradients.partial is None:
        return place.within(gradients.reduced, 0, place.mine)
    return place.collect(place.in_shard(gradients.sum_so_far()))


def _sum_over_ranks(place: Reach) -> torch.Tensor:
    """Unreduced gradients of one parameter, summed as the reduction of its unit would, 1-D; collective."""
    gradients, transport, plan = place.gradients, place.parts.transport, place.parts.plan
    numel = place.slot.numel
    if not numel:
        return torch.zeros(0, dtype=place.flat.master_dtype, device=place.flat.device)
    shard_numel = -(-numel // transport.world)
    own = gradients.unreduced(place.index)
    dtype = gradients.accumulate if own is None else own.dtype
    local = torch.zeros(shard_numel * transport.world, dtype=dtype, device=place.flat.device)
    if own is not None:
        local[:numel].copy_(own)
    narrow = place.flat.master_dtype == torch.float32
    how = ReduceHow(
        wire=dtype_of(plan.precision.wire) if narrow else dtype,
        accumulate=False,
        bucket_numel=plan.communication.reduce_bucket_numel,
        label=f"{place.unit.label}, {place.doing}",
    )
    summed = torch.empty(shard_numel, dtype=gradients.accumulate, device=place.flat.device)
    transport.reduce_scatter(local, summed, how).wait()
    whole = torch.empty(local.numel(), dtype=gradients.accumulate, device=place.flat.device)
    whole[transport.rank * shard_numel : (transport.rank + 1) * shard_numel].copy_(summed)
    transport.all_gather(whole, f"{place.unit.label}, {place.doing}").wait()
    return whole[:numel].to(place.flat.master_dtype)


def _reduce_now(place: Reach) -> None:
    """Reduce the whole model in the middle of a window; what still comes is added in the accumulation dtype."""
    parts = place.parts
    parts.executor.reduce_everything()
    parts.executor.settle_reductions()
    parts.unsynced = False
    # Sharded gradients are reduced before the next micro-batch anyway, so a wider buffer would only take memory.
    parts.mode.widen = parts.mode.widen or place.gradients.keeps_local


def _write_sum(place: Reach, part: torch.Tensor) -> None:
    shard = place.gradients.sum_so_far()
    place.in_shard(shard).copy_(part)
    place.gradients.restart(shard)
    _announce_gradient(place)


def _announce_gradient(place: Reach) -> None:
    place.gradients.present[place.index] = True
    place.gradients.end_backward()
