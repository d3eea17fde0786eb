"""What tells whether a rank's own gradients are finite: right for what each dtype holds, and without a wider copy."""

from types import SimpleNamespace

import pytest
import torch

from shardledger.runtime.gradients import FlatGradients

NUMEL = 3 << 18


def look(local):
    seen = SimpleNamespace(probe=None)
    FlatGradients._look_at(seen, local)
    return bool(seen.probe.isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_shows_and_many_large_ones_do_not(dtype):
    local = torch.full((NUMEL,), 6e4, dtype=dtype)  # two of them are more than fp16 holds
    assert look(local)
    for value in (float("inf"), float("-inf"), float("nan")):
        local[NUMEL - 1] = value
        assert not look(local)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_look_takes_no_copy_of_the_gradients(dtype):
    local = torch.ones(NUMEL, dtype=dtype)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        look(local)
    now = highest = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            highest = max(highest, now)
    assert highest <= (1 << 20) + 1024, "of fp16 one piece in fp32"
