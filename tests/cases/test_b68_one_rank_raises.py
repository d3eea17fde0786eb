"""B68: one rank raises or dies; the others stop within seconds and say who, at which step and phase, and why."""

import pytest

from support.ranks import run_ranks_raw

SCRIPT = """
import os, sys
import torch
torch.set_num_threads(1)
import shardledger as sl
from support.models import build, data
from support.oracle import micro_batches
from support.training import config, place

rank, world = place()
part = micro_batches(data("transformer", 12), rank, world, 1)[0]
settings = {{
    **config({stage}), "train_micro_batch_size_per_gpu": len(part[0]), "shardledger": {{"timeout_s": {timeout}}}
}}
engine = sl.initialize(model=build("transformer"), config=settings)[0]
def trap(*arguments):
    if rank == 1 and engine.global_steps == 1:
        {how}
next(engine.module.blocks[1].children()).register_forward_hook(trap)
for step in range(50):
    {step}
print("came to the end")
"""
PLAIN = "engine.backward(engine(*part)); engine.step()"
LIMIT_S = 20.0


@pytest.mark.parametrize(
    ("how", "stage", "world", "reason"),
    [
        ("raise ValueError('no such token: needle')", 3, 3, "ValueError: no such token: needle"),
        ("raise ValueError('no such token: needle')", 0, 2, "ValueError: no such token: needle"),
        ("os._exit(3)", 2, 3, "failed at rank 1"),
    ],
)
def test_survivors_say_who_at_which_step_and_phase_and_why(how, stage, world, reason):
    ranks = run_ranks_raw(SCRIPT.format(stage=stage, how=how, timeout=120, step=PLAIN), world, timeout=90)
    for rank, one in enumerate(ranks):
        assert one.code not in (0, None), one.output
        assert one.ended_s - ranks[1].ended_s < LIMIT_S
        if rank != 1:
            assert "PeerLostError" in one.output and "rank 1" in one.output
            assert reason in one.output and "step 2, " in one.output, one.output
    if "needle" in how:
        assert ranks[1].output.strip().splitlines()[-1].endswith(reason), "its own traceback is the last it says"


def test_a_rank_that_catches_its_error_and_leaves_is_named_with_the_reason():
    step = "\n    ".join(["try:", f"    {PLAIN}", "finally:", "    sys.exc_info()[1] and engine.destroy()"])
    how = "raise ValueError('needle')"
    ranks = run_ranks_raw(SCRIPT.format(stage=3, how=how, timeout=120, step=step), 2, timeout=90)
    assert "rank 1 failed at step 2, forward: ValueError: needle" in ranks[0].output, ranks[0].output
    assert ranks[1].output.strip().splitlines()[-1].endswith("ValueError: needle")


def test_a_rank_that_lags_is_named_after_the_configured_timeout():
    how = "import time; time.sleep(14)"
    ranks = run_ranks_raw(SCRIPT.format(stage=2, how=how, timeout=4, step=PLAIN), 3, timeout=50)
    for rank in (0, 2):
        assert ranks[rank].code not in (0, None)
        assert "rank 1" in ranks[rank].output and "is stuck" in ranks[rank].output, ranks[rank].output
        assert "step 2, " in ranks[rank].output


@pytest.mark.parametrize("stage", [1, 2])
def test_a_collective_that_one_rank_leaves_out_while_a_reduction_is_under_way_is_named_at_once(stage):
    """Without a rule each rank would wait for the other: for the rest of the reduction, and for what does not come."""
    step = "engine.backward(engine(*part)); step == 1 and rank == 0 and engine.state_dict(); engine.step()"
    script = SCRIPT.replace("**config({stage})", "**config({stage}, zero={{'reduce_bucket_size': 64}})")
    ranks = run_ranks_raw(script.format(stage=stage, how="pass", timeout=120, step=step), 2, timeout=60)
    for rank, one in enumerate(ranks):
        assert one.code not in (0, None), one.output
        assert "RanksDisagreeError" in one.output and f"rank {1 - rank} at step 2" in one.output, one.output
        assert "gather of" in one.output and "exchange of the gradient norm" in one.output, one.output
