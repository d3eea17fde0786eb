"""B70: one gather for every tiny Linear makes stage 3 half as fast as stage 2."""

import pytest
import torch

from support.models import Transformer, tokens
from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
BLOCKS = 6


def make():
    torch.manual_seed(0)
    return Transformer(vocabulary=16, width=64, layers=BLOCKS)


def count(threshold):
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            zero = {"stage3_param_persistence_threshold": threshold}
            engine = sl.initialize(model=make(), config=config(stage, optimizer="AdamW", zero=zero))[0]
            for _ in range(2):
                engine.backward(engine(*tokens(1, vocabulary=16)))
                engine.step()
            found[stage] = engine.communication()["step"]
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_step_needs_one_collective_a_block_and_pass(world):
    numel = sum(p.numel() for p in make().parameters())
    share = numel * (world - 1) / world
    units = BLOCKS + 1  # and what belongs to no block
    for found in run_ranks(count, world, 0):
        for stage, step in found.items():
            passes = 2 if stage == 3 else 1
            assert step["reduce_scatter"]["elements"] == pytest.approx(share, rel=0.01), f"stage {stage}"
            assert step["all_gather"]["elements"] == pytest.approx(passes * share, rel=0.01), f"stage {stage}"
            assert step["all_gather"]["calls"] <= passes * units, f"stage {stage}"
            assert step["reduce_scatter"]["calls"] <= units, f"stage {stage}"


def test_parameters_below_the_threshold_stay_and_cost_no_gather_in_the_passes():
    numel = sum(p.numel() for p in make().parameters())
    small = sum(p.numel() for p in make().parameters() if p.numel() < 1000)
    assert small > 1000
    for found in run_ranks(count, 2, 1000):
        # What stays is gathered once, after the step; the rest twice, in forward and in backward.
        expected = (2 * (numel - small) + small) / 2
        assert found[3]["all_gather"]["elements"] == pytest.approx(expected, rel=0.02)


def test_the_threshold_may_be_left_to_the_plan():
    for found in run_ranks(count, 2, "auto"):
        assert found[3]["reduce_scatter"]["elements"] > 0
