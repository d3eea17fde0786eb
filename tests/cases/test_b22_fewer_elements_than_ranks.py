"""B22: a parameter with fewer elements than ranks: empty shards crash, or one rank raises, the rest hang."""

import pytest
import torch
from torch import nn

from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
RATES = (0.1, 0.05, 0.2)


class Three(nn.Module):
    """Parameters of 1, 3 and 5 elements."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.three = nn.Parameter(torch.arange(1.0, 4.0))
        self.five = nn.Parameter(torch.arange(1.0, 6.0))

    def forward(self, x):
        return x * (self.one.pow(2).sum() + self.three.pow(2).sum() + self.five.pow(3).sum())

    def groups(self):
        parameters = (self.one, self.three, self.five)
        return [{"params": [p], "lr": lr} for p, lr in zip(parameters, RATES, strict=True)]


def train_groups(way, limit, precision):
    import shardledger as sl

    found = {}
    with group(30):
        for stage in STAGES:
            model = Three()
            settings = config(
                stage,
                optimizer="AdamW",
                optimizer_params={"weight_decay": 0.01},
                gradient_clipping=limit,
                precision=precision,
            )
            if way == "json":
                settings["scheduler"] = {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}
                engine = sl.initialize(model=model, config=settings, model_parameters=model.groups())[0]
            else:
                del settings["optimizer"]
                optimizer = torch.optim.AdamW(model.groups(), lr=0.1)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
                engine = sl.initialize(model=model, config=settings, optimizer=optimizer, lr_scheduler=scheduler)[0]
            norms = []
            for _ in range(4):
                engine.backward(engine(torch.tensor(0.01 * (1 + engine.rank))))
                engine.step()
                norms.append(engine.get_global_grad_norm())
            found[stage] = (engine.state_dict(), norms, engine.get_lr())
            engine.destroy()
    return found


def train_plainly(world, limit):
    model = Three()
    optimizer = torch.optim.AdamW(model.groups(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        sum(model(torch.tensor(0.01 * (1 + rank))) / world for rank in range(world)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))))
        optimizer.step()
        scheduler.step()
    return model.state_dict(), norms, scheduler.get_last_lr()


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize(("way", "limit"), [("json", 0.0), ("json", 0.1), ("own", 0.1)])
def test_empty_shards_train_like_one_process(world, way, limit):
    right, norms, rates = train_plainly(world, limit)
    for rank, found in enumerate(run_ranks(train_groups, world, way, limit, "fp32")):
        for stage, (weights, our_norms, our_rates) in found.items():
            assert our_norms == pytest.approx(norms, rel=1e-4), f"rank {rank}, stage {stage}"
            assert our_rates == pytest.approx(rates), f"rank {rank}, stage {stage}"
            if rank == 0:
                assert largest_difference(weights, right) <= 1e-5, f"stage {stage}"


def test_empty_shards_train_in_bf16():
    right, norms, _ = train_plainly(4, 0.1)
    found = run_ranks(train_groups, 4, "json", 0.1, "bf16")[0]
    for stage, (weights, our_norms, _) in found.items():
        assert our_norms == pytest.approx(norms, rel=3e-2), f"stage {stage}"
        assert largest_difference(weights, right) <= 2e-2, f"stage {stage}"
