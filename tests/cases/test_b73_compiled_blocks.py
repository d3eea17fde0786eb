"""B73: torch.compile breaks with the hooks of stage 3 or with frozen parameters, or leaves its prefix in saved keys."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.models import numbers
from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
STEPS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Blocks of which the second is frozen; x[n, 8], y[n, 8]."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[1].requires_grad_(False)

    def forward(self, x, y):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def make(way, backend):
    """What is compiled: each block in its place (a wrapper with a prefix), each block's own forward, or the model."""
    torch.manual_seed(0)
    model = Net()
    if way == "wrapped blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    elif way == "blocks in place":
        for block in model.blocks:
            block.compile(backend=backend)
    elif way == "model":
        return torch.compile(model, backend=backend)
    return model


def batch(rank, step):
    return numbers(3, 8, 8, seed=10 * rank + step)


def train_compiled(way, backend, stages):
    import shardledger as sl

    found = {}
    rank, _ = place()
    with group(60):
        for stage in stages:
            torch._dynamo.reset()
            try:
                engine = sl.initialize(model=make(way, backend), config=config(stage))[0]
            except sl.ShardledgerError as refusal:
                found[stage] = str(refusal)
                continue
            try:
                losses = []
                for step in range(STEPS):
                    loss = engine(*batch(rank, step))
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss.detach()))
                found[stage] = (losses, engine.state_dict())
            except sl.ShardledgerError as refusal:
                found[stage] = str(refusal)
            engine.destroy()
    return found


@pytest.mark.xfail(strict=True, reason="compiled modules are refused by name at every stage, not only at stage 3")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("way", ["blocks in place", "wrapped blocks", "model"])
def test_compiled_training_equals_eager_training_or_is_refused(way, backend):
    eager = make("", backend)
    keys = list(eager.state_dict())
    optimizer = torch.optim.SGD([p for p in eager.parameters() if p.requires_grad], lr=0.1)
    right = [[], []]
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(2):
            loss = eager(*batch(rank, step))
            right[rank].append(float(loss.detach()))
            (loss / 2).backward()
        optimizer.step()
    ranks = run_ranks(train_compiled, 2, way, backend, STAGES, timeout=150)
    for rank, stage in itertools.product(range(2), STAGES):
        seen = ranks[rank][stage]
        if isinstance(seen, str):
            assert stage == 3 and "compile" in seen, f"stage {stage} refused without saying why: {seen}"
            continue
        losses, weights = seen
        assert losses == pytest.approx(right[rank], rel=1e-5), f"stage {stage}"
        if rank == 0:
            assert list(weights) == keys, f"stage {stage}: keys carry the wrapper's prefix"
            Net().load_state_dict(weights, strict=True)
            assert largest_difference(weights, eager.state_dict()) <= 1e-6, f"stage {stage}"
