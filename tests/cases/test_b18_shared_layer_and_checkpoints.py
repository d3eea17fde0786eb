"""B18: a layer applied several times under activation checkpointing: its gradient counts once for every use."""

import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.models import numbers
from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
WAYS = (None, False, True)  # use_reentrant, or no checkpoint
TURNS = 6


class Shared(nn.Module):
    """One Linear(4, 4) applied six times; x[n, 4] -> x[n, 4]. `blocks`: the layer is a unit of its own."""

    def __init__(self, way, blocks):
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2 if blocks else 1))

    def forward(self, x):
        for turn in range(TURNS):
            layer = self.layers[0] if turn < TURNS - 1 else self.layers[-1]
            x = layer(x) if self.way is None else checkpoint(layer, x, use_reentrant=self.way)
        return x


def make(way, blocks):
    torch.manual_seed(0)
    return Shared(way, blocks)


def batch(rank, step):
    x, _ = numbers(3, 4, seed=10 * rank + step)
    return x.requires_grad_()  # a reentrant checkpoint gives no gradients otherwise


def finish(x, scalar):
    """Backward from a scalar, or from the outputs with a given gradient."""
    if scalar:
        return x.square().sum()
    return x


def train_shared(blocks, scalar):
    import shardledger as sl

    found = {}
    rank, _ = place()
    with group(30):
        for stage, way in itertools.product(STAGES, WAYS):
            engine = sl.initialize(model=make(way, blocks), config=config(stage))[0]
            for step in range(2):
                out = finish(engine(batch(rank, step)), scalar)
                if scalar:
                    engine.backward(out)
                else:
                    out.backward(torch.linspace(-1, 1, out.numel()).view_as(out))
                engine.step()
            found[stage, way] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("scalar", [True, False])
@pytest.mark.parametrize("blocks", [False, True])
def test_gradients_equal_the_run_without_checkpoints(blocks, scalar, world):
    model = make(None, blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for rank in range(world):
            out = finish(model(batch(rank, step)), scalar)
            seed = torch.ones(()) if scalar else torch.linspace(-1, 1, out.numel()).view_as(out)
            out.backward(seed / world)
        optimizer.step()
    for (stage, way), weights in run_ranks(train_shared, world, blocks, scalar)[0].items():
        assert largest_difference(weights, model.state_dict()) <= 1e-6, f"stage {stage}, use_reentrant={way}"
