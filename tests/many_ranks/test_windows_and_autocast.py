"""A window that ends early has its real divisor, and torch.autocast computes what it computes without sharding."""

import pytest
import torch

from support.models import build, data
from support.oracle import largest_difference, micro_batches, same_bits
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
ACCUMULATION = 3


def parts_of(rank, world, count=ACCUMULATION):
    return micro_batches(data("regressor", 4 * world * count), rank, world, count)


def end_windows_early(weighted):
    """Windows of 2 (closed by flush), of 3, and of 1 (a forced boundary) -> stage: weights, steps."""
    import shardledger as sl

    rank, world = place()
    found = {}
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=build("regressor"), config=config(stage, accumulation=ACCUMULATION))[0]
            for window in (2, 3, 1):
                for index, part in enumerate(parts_of(rank, world)[:window]):
                    if window == 1:
                        engine.set_gradient_accumulation_boundary(True)
                    weight = float(1 + rank + 2 * index) if weighted else None
                    engine.backward(engine(*part), denominator=weight)
                    engine.step()
                engine.flush()
                engine.flush()  # nothing is left, so nothing happens
            found[stage] = engine.state_dict(), engine.global_steps
            engine.destroy()
    return found


def plain_windows(world, weighted):
    model = build("regressor")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in (2, 3, 1):
        optimizer.zero_grad()
        total = weights = 0.0
        for rank in range(world):
            for index, part in enumerate(parts_of(rank, world)[:window]):
                weight = 1 + rank + 2 * index if weighted else 1
                total, weights = total + model(*part) * weight, weights + weight
        (total / weights).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("weighted", (False, True))
@pytest.mark.parametrize("world", (1, 3))
def test_windows_that_end_early_average_over_what_was_there(world, weighted):
    right = plain_windows(world, weighted)
    for stage, (weights, steps) in run_ranks(end_windows_early, world, weighted)[0].items():
        assert steps == 3, stage
        assert largest_difference(weights, right) <= 1e-6, stage


def train_under_autocast(accumulate):
    import shardledger as sl

    rank, world = place()
    part = micro_batches(data("transformer", 4 * world), rank, world, 1)[0]
    found = {}
    with group():
        for stage in STAGES:
            settings = config(
                stage,
                torch_autocast={"enabled": True, "dtype": "bfloat16"},
                data_types={"grad_accum_dtype": accumulate},
            )
            engine = sl.initialize(
                model=build("transformer"), config={**settings, "train_micro_batch_size_per_gpu": 4}
            )[0]
            dtypes = set()
            engine.module.blocks[0].mix.register_forward_hook(lambda m, i, o, seen=dtypes: seen.add(o.dtype))
            for _ in range(3):
                engine.backward(engine(*part))
                engine.step()
            reduced = {g.reduced.dtype for unit in engine._parts.units for g in unit.gradients}
            found[stage] = engine.state_dict(), dtypes, {p.dtype for p in engine.module.parameters()}, reduced
            engine.destroy()
    return found


def plain_autocast(world):
    model = build("transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(world):
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                loss = model(*micro_batches(data("transformer", 4 * world), rank, world, 1)[0])
            (loss / world).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("accumulate", ("fp32", "fp16"))
def test_autocast_lowers_the_operations_and_nothing_else(accumulate):
    found = run_ranks(train_under_autocast, 2, accumulate)[0]
    right = plain_autocast(2)
    for stage, (weights, activations, parameters, reduced) in found.items():
        assert activations == {torch.bfloat16} and parameters == {torch.float32}
        assert reduced == {torch.float32 if accumulate == "fp32" else torch.float16}
        if accumulate == "fp32":  # a narrower sum is rounded before or after ranks are added
            assert not same_bits(weights, found[0][0]), stage
        assert largest_difference(weights, right) <= (2e-6 if accumulate == "fp32" else 2e-3), stage
