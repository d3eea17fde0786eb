"""B19: frozen weights under non-reentrant checkpoints at stage 3: what is recomputed must find them whole."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.models import numbers
from support.oracle import largest_difference, micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
WIDTH = 16
WAYS = (None, False, True)  # use_reentrant, or no checkpoint


class Adapted(nn.Module):
    """A frozen Linear(16, 16) with a trainable low-rank path A(16, 2), B(2, 16)."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, 2) * 0.1)
        self.b = nn.Parameter(torch.randn(2, WIDTH) * 0.1)

    def forward(self, x):
        return torch.tanh(self.base(x) + x @ self.a @ self.b)


class Model(nn.Module):
    """`layers` of them; x[n, 16], y[n, 16]."""

    def __init__(self, layers, way):
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(Adapted() for _ in range(layers))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x) if self.way is None else checkpoint(layer, x, use_reentrant=self.way)
        return F.mse_loss(x, y)


def make(layers, way=None):
    torch.manual_seed(0)
    return Model(layers, way)


def batch(world, accumulation):
    x, y = numbers(world * accumulation * 2, WIDTH, WIDTH)
    return x, y


def sharded_again(engine):
    """Bytes of frozen weights that this rank holds in full."""
    return sum(
        flat.full.untyped_storage().nbytes()
        for unit in engine._parts.units
        for flat in unit.flats
        if flat.layout.param_sharded and not flat.layout.trainable
    )


def train_adapted(layers, accumulation):
    import shardledger as sl

    found = {}
    rank, world = place()
    with group(30):
        for stage, way, threshold in itertools.product(STAGES, WAYS, (0, 10**9)):
            zero = {"stage3_param_persistence_threshold": threshold}
            settings = config(stage, accumulation=accumulation, zero=zero)
            engine = sl.initialize(model=make(layers, way), config={**settings, "train_micro_batch_size_per_gpu": 2})[0]
            losses = []
            for _ in range(2):
                for x, y in micro_batches(batch(world, accumulation), rank, world, accumulation):
                    # A reentrant checkpoint gives no gradients when its inputs need none.
                    loss = engine(x.clone().requires_grad_(), y)
                    engine.backward(loss)
                    engine.step()
                    losses.append(float(loss.detach()))
            found[stage, way, threshold] = (engine.state_dict(), losses, sharded_again(engine))
            engine.destroy()
    return found


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_checkpoints_over_frozen_weights_change_nothing(accumulation, layers):
    world = 2
    model = make(layers)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(*batch(world, accumulation))
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    ranks = run_ranks(train_adapted, world, layers, accumulation, timeout=90)
    for key, (weights, _, held) in ranks[0].items():
        assert largest_difference(weights, model.state_dict()) <= 1e-6, key
        assert all(torch.equal(weights[name], value) for name, value in frozen.items()), key
        assert held == 0, f"{key}: frozen weights were not sharded again"
        every = [rank[key][1] for rank in ranks]
        means = [sum(sum(r[step * accumulation : (step + 1) * accumulation]) for r in every) for step in range(2)]
        assert [mean / world / accumulation for mean in means] == pytest.approx(losses, rel=1e-5), key
