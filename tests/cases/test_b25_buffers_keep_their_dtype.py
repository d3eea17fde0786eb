"""B25: buffers are cast with the weights, and rotary frequencies, counters and running statistics lose precision."""

import pytest
import torch

from support.models import build, data
from support.oracle import micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


def one_step():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            x, y = micro_batches(data("buffered", 12), *place(), 1)[0]
            settings = {**config(stage, precision="bf16"), "train_micro_batch_size_per_gpu": len(x)}
            engine = sl.initialize(model=build("buffered"), config=settings)[0]
            engine.backward(engine(x.to(torch.bfloat16), y))
            engine.step()
            buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
            weights = {str(p.dtype) for p in engine.module.parameters()}
            found[stage] = (buffers, weights, engine.state_dict(all_ranks=True))
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_buffers_keep_their_dtype_under_bf16(world):
    before = dict(build("buffered").named_buffers())
    for found in run_ranks(one_step, world):
        for stage, (buffers, weights, state) in found.items():
            assert weights == {"torch.bfloat16"}
            assert {k: v.dtype for k, v in buffers.items()} == {k: v.dtype for k, v in before.items()}, stage
            assert torch.equal(buffers["inv_freq"], before["inv_freq"])
            assert float(buffers["count"]) == 257.0, "256 + 1 is 256 in bf16"
            assert buffers["norm.running_mean"].abs().sum() > 0
            assert torch.equal(state["inv_freq"], before["inv_freq"])
            assert state["norm.running_mean"].dtype == torch.float32
            assert "hidden" not in state
