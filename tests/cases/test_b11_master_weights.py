"""B11: the optimizer works on bf16 parameters and keeps weights and moments in bf16."""

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)


class Weight(nn.Module):
    """One weight, born in fp32 or bf16; its gradient is x."""

    def __init__(self, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x):
        return (self.w * x).sum()


def hundred_steps(dtype):
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=Weight(dtype), config=config(stage, lr=1e-3, precision="bf16"))[0]
            x = torch.ones(1, dtype=torch.bfloat16)
            for _ in range(100):
                engine.backward(engine(x))
                engine.step()
            engine.eval()
            with torch.no_grad():
                view = engine(x)
            found[stage] = (engine.state_dict(all_ranks=True)["w"], float(view), str(view.dtype))
            engine.destroy()
    return found


@pytest.mark.parametrize(("dtype", "world"), [(torch.float32, 1), (torch.bfloat16, 1), (torch.bfloat16, 2)])
def test_small_steps_add_up_in_an_fp32_master(dtype, world):
    for found in run_ranks(hundred_steps, world, dtype):
        for master, view, kind in found.values():
            assert master.dtype == torch.float32
            assert float(master) == pytest.approx(0.9, abs=1e-5)
            assert view == pytest.approx(0.8984, abs=1e-4)
            assert kind == "torch.bfloat16"


def optimizer_dtypes():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            torch.manual_seed(0)
            engine, optimizer, _, _ = sl.initialize(
                model=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)),
                config=config(stage, optimizer="AdamW", precision="bf16"),
            )
            engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum())
            engine.step()
            masters = [str(p.dtype) for g in optimizer.param_groups for p in g["params"]]
            moments = [
                (key, str(value.dtype))
                for state in optimizer.state.values()
                for key, value in state.items()
                if key in ("exp_avg", "exp_avg_sq")
            ]
            found[stage] = (masters, moments)
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_masters_and_moments_are_fp32(world):
    for stage in STAGES:
        masters, moments = [], []
        for found in run_ranks(optimizer_dtypes, world):
            masters += found[stage][0]
            moments += found[stage][1]
        assert masters and set(masters) == {"torch.float32"}
        assert set(moments) == {("exp_avg", "torch.float32"), ("exp_avg_sq", "torch.float32")}
