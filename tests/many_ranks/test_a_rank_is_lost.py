"""A rank dies or raises: the others end within 15 s and name it. After a caught exception the engine works on."""

import pytest
import torch

from support.models import build, data
from support.oracle import micro_batches, same_bits
from support.ranks import run_ranks, run_ranks_raw
from support.training import config, group, place

SCRIPT = """
import os, signal
import torch
torch.set_num_threads(1)
import shardledger as sl
from support.models import build, data
from support.oracle import micro_batches
from support.training import config, place

rank, world = place()
part = micro_batches(data("transformer", 12), rank, world, 1)[0]
settings = {{**config({stage}), "train_micro_batch_size_per_gpu": len(part[0])}}
settings["shardledger"] = {{"transport": "{wire}"}}
engine = sl.initialize(model=build("transformer"), config=settings)[0]
for step in range(50):
    if step == 2 and rank == 1:
        print("about to go", flush=True)
        {how}
    engine.backward(engine(*part))
    engine.step()
print("came to the end")
"""
LIMIT_S = 15.0


@pytest.mark.parametrize(
    ("how", "stage", "world", "wire"),
    [
        ("os._exit(3)", 3, 3, "shared_memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, 2, "shared_memory"),
        ("os._exit(3)", 0, 2, "gloo"),
        ("raise RuntimeError('needle')", 1, 3, "gloo"),
        ("raise RuntimeError('needle')", 1, 3, "shared_memory"),
        ("next(engine.module.blocks[1].children()).register_forward_hook(lambda *a: 1 / 0)", 3, 2, "shared_memory"),
    ],
)
def test_survivors_end_soon_and_name_the_lost_rank(how, stage, world, wire):
    ranks = run_ranks_raw(SCRIPT.format(stage=stage, how=how, wire=wire), world, timeout=60)
    assert "about to go" in ranks[1].output
    for rank, survivor in enumerate(ranks):
        assert survivor.code is not None, f"rank {rank} never ended:\n{survivor.output}"
        assert survivor.code != 0
        assert survivor.ended_s - ranks[1].ended_s < LIMIT_S, f"rank {rank} took too long"
        assert "came to the end" not in survivor.output
        if rank != 1:
            assert "rank 1" in survivor.output, f"rank {rank} does not name rank 1:\n{survivor.output}"


@pytest.mark.parametrize("wire", ["shared_memory", "gloo"])
def test_who_comes_late_names_the_rank_that_was_lost_first_too(wire):
    how = """os._exit(3)
    if step == 2 and rank == 0:
        import time
        time.sleep(4)"""  # by then rank 2 has noticed and ended too
    ranks = run_ranks_raw(SCRIPT.format(stage=3, how=how, wire=wire), 3, timeout=60)
    assert ranks[2].ended_s < ranks[0].ended_s - 1
    assert "Rank 1 died" in ranks[2].output
    last = ranks[0].output.strip().splitlines()[-1]
    assert "rank 1" in last.lower(), ranks[0].output


class Trap(torch.autograd.Function):
    """Identity that raises in backward when armed."""

    armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Trap.armed:
            raise ValueError("trap in backward")
        return grad


def raise_then_go_on(where):
    """Two good steps, a failed one on every rank, two good steps; against four good steps."""
    import shardledger as sl

    found = {}
    with group():
        for stage in (0, 1, 2, 3):
            for fails in (False, True):
                model = build("transformer")
                middle = model.blocks[1].mlp[1]
                armed = [False]

                def hook(module, inputs, output, armed=armed):
                    if armed[0] and where == "forward":
                        raise ValueError("trap in forward")
                    return Trap.apply(output)

                middle.register_forward_hook(hook)
                part = micro_batches(data("transformer", 12), *place(), 1)[0]
                settings = {**config(stage, optimizer="AdamW"), "train_micro_batch_size_per_gpu": len(part[0])}
                engine = sl.initialize(model=model, config=settings)[0]
                for step in range(4):
                    if fails and step == 2:
                        armed[0] = Trap.armed = True
                        with pytest.raises(ValueError, match="trap"):
                            engine.backward(engine(*part))
                        armed[0] = Trap.armed = False
                    engine.backward(engine(*part))
                    engine.step()
                found[stage, fails] = (engine.state_dict(), engine.global_steps)
                engine.destroy()
    return found


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_an_engine_that_goes_on(where):
    found = run_ranks(raise_then_go_on, 2, where)[0]
    for stage in (0, 1, 2, 3):
        weights, steps = found[stage, True]
        assert steps == 4
        assert same_bits(weights, found[stage, False][0]) == [], f"stage {stage}"


def disagree():
    import shardledger as sl
    from shardledger.errors import RanksDisagreeError

    with group(20):
        stage = 1 + place()[0]
        try:
            sl.initialize(model=build("regressor"), config=config(stage))
        except RanksDisagreeError as error:
            return str(error)
    return "no error"


def test_ranks_with_other_plans_are_told_so():
    for text in run_ranks(disagree, 2, timeout=40):
        assert "rank" in text and text != "no error"
