"""B10: bf16 runs accumulate gradients in bf16, and small contributions vanish."""

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
COUNT = 257


class Weight(nn.Module):
    """The gradient is x."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return (self.w * x).sum()


def accumulate(dtype):
    """Gradients 1, then 256 times 2^-9; with lr = 257 the weight becomes minus their sum."""
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            settings = config(stage, lr=float(COUNT), accumulation=COUNT, precision="bf16")
            if dtype is not None:
                settings["data_types"] = {"grad_accum_dtype": dtype}
            engine = sl.initialize(model=Weight(), config=settings)[0]
            for step in range(COUNT):
                x = torch.tensor([1.0 if step == 0 else 2.0**-9], dtype=torch.bfloat16)
                engine.backward(engine(x))
                engine.step()
            found[stage] = -float(engine.state_dict(all_ranks=True)["w"])
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_accumulation_is_in_fp32_by_default(world, dtype):
    for found in run_ranks(accumulate, world, dtype, timeout=120):
        assert found == pytest.approx(dict.fromkeys(STAGES, 1.5), rel=5e-3)


def test_bf16_accumulation_is_had_only_by_asking():
    (found,) = run_ranks(accumulate, 1, "bf16", timeout=120)
    assert found == pytest.approx(dict.fromkeys(STAGES, 1.0), rel=5e-3)
