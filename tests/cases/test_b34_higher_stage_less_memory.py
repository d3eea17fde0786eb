"""B34: a higher stage must not use more memory on a small model: buckets are capped by the model's own size."""

import pytest
import torch

from shardledger.ledger.fit import Situation
from shardledger.ledger.recommend import recommend
from support.memory import PeakMeter
from support.models import Stack, numbers
from support.ranks import run_ranks
from support.rows import GIB, rows_of
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


@pytest.mark.parametrize("parameters", [1e6, 1e7])
def test_advice_for_a_small_model_is_that_nothing_needs_to_be_sharded(parameters):
    situation = Situation(device_memory=16 * GIB, world=2, parameters=int(parameters))
    answer = recommend(rows_of(parameters, 2, activations=0.1), situation)
    assert answer.row.stage == 0 and "Nothing needs to be sharded" in answer.reason
