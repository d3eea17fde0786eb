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
WAYS = ("blocks in place", "wrapped blocks", "model", "engine", "after initialize")


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
    """What is compiled: each block in its place (a wrapper with a prefix), each block's own call, or the model."""
    torch.manual_seed(0)
    model = Net()
    if way == "wrapped blocks":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
    elif way == "blocks in place":
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    elif way == "model":
        return torch.compile(model, backend=backend)
    return model


def batch(rank, step):
    return numbers(3, 8, 8, seed=10 * rank + step)


def train_compiled(way, backend, stage):
    from torch._dynamo.utils import counters

    import shardledger as sl

    torch._dynamo.reset()
    counters.clear()
    engine = sl.initialize(model=make(way, backend), config=config(stage))[0]
    if way == "engine":
        engine.compile(backend)
    elif way == "after initialize":
        for block in engine.module.blocks:
            block.compile(backend=backend)
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(place()[0], step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    weights = engine.state_dict()
    engine.destroy()
    return losses, weights, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def train_all():
    runs = {*itertools.product(("not compiled", "engine"), STAGES), *itertools.product(WAYS, (3,))}
    with group(60):
        return {
            (way, stage): train_compiled(way, "eager" if way == "after initialize" else "aot_eager", stage)
            for way, stage in sorted(runs)
        }


def test_compiled_training_equals_eager_training_whatever_was_compiled_and_at_every_stage():
    eager = make("", "")
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
    ranks = run_ranks(train_all, 2, timeout=150)
    for rank, found in enumerate(ranks):
        for (way, stage), (losses, weights, graphs, breaks) in found.items():
            what = f"{way}, stage {stage}"
            # One graph of the blocks that train and one of the frozen one, whatever the step: nothing is traced twice.
            assert graphs == (0 if way == "not compiled" else 2), f"{what}: {graphs} graphs"
            assert not breaks, what
            plain = found["not compiled", stage]
            assert losses == plain[0], what
            assert losses == pytest.approx(right[rank], rel=1e-5), what
            if rank == 0:
                assert list(weights) == keys, f"{what}: keys carry the wrapper's prefix"
                assert all(torch.equal(weights[key], plain[1][key]) for key in keys), what
                Net().load_state_dict(weights, strict=True)
                assert largest_difference(weights, eager.state_dict()) <= 1e-6, what
