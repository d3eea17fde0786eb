"""B34: a higher stage must not use more memory on a small model: buckets are capped by the model's own size."""

import pytest
import torch

from support.memory import PeakMeter
from support.models import Stack, numbers
from support.ranks import run_ranks
from support.training import group

STAGES = (0, 1, 2, 3)
WIDTH, LAYERS = 200, 25  # 1,005,000 parameters
NUMEL = WIDTH * (WIDTH + 1) * LAYERS
UNIT = WIDTH * (WIDTH + 1)
STATE = ("params", "grads", "master", "optimizer")


def weigh(stages):
    """The default configuration: nothing said about buckets."""
    import shardledger as sl

    found = {}
    with group():
        for stage in stages:
            meter = PeakMeter()
            with meter:
                torch.manual_seed(0)
                settings = {
                    "train_micro_batch_size_per_gpu": 1,
                    "zero_optimization": {"stage": stage},
                    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                }
                engine = sl.initialize(model=Stack(WIDTH, LAYERS), config=settings)[0]
                for _ in range(2):
                    meter.peak = 0
                    engine.backward(engine(*numbers(1, WIDTH, WIDTH)))
                    engine.step()
            found[stage] = (engine.ledger()["measured"], meter.peak)
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [2])
def test_states_fall_with_the_stage_and_buckets_are_no_larger_than_a_unit_needs(world):
    for found in run_ranks(weigh, world, STAGES, timeout=120):
        states = [sum(found[stage][0][category] for category in STATE) for stage in STAGES]
        assert states == sorted(states, reverse=True), states
        assert len(set(states)) == len(states), states
        peaks = [found[stage][1] for stage in STAGES]
        assert peaks == sorted(peaks, reverse=True), peaks
        for stage, (measured, peak) in found.items():
            # A few units in flight: gathered ones, gradients on their way and what they are received into.
            assert measured["communication"] <= 6 * UNIT * 4, f"stage {stage}"
            assert peak <= sum(measured[category] for category in STATE) + 8 * UNIT * 4, f"stage {stage}"
