"""B21: parameters without elements crash, or lose their shape."""

import pytest
import torch
from torch import nn

from support.models import numbers
from support.oracle import largest_difference, make_optimizer, micro_batches, reference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


class EmptyAtTheEnd(nn.Module):
    """Linear(4,4) and then a Linear(4,0) that is never called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.empty = nn.Linear(4, 0, bias=False)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.first(x).sum(dim=1, keepdim=True), y)


class EmptyInTheMiddle(nn.Module):
    """Parameters of 8, 0 and 24 elements."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 2))
        self.none = nn.Parameter(torch.empty(0, 8))
        self.b = nn.Parameter(torch.randn(2, 12))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss((x @ self.a @ self.b).sum(dim=1, keepdim=True), y)


class EmptyInUse(nn.Module):
    """A Linear(4,0) whose output is used, and one parameter without elements alone in its dtype and unit."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.empty = nn.Linear(4, 0)
        self.frozen = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x, y):
        hidden = self.first(x)
        return torch.nn.functional.mse_loss(hidden.sum(dim=1, keepdim=True) + self.empty(hidden).sum(), y)


class OnlyEmptyBlocks(nn.Module):
    """Units that hold nothing at all."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 0, bias=False), nn.Identity()) for _ in range(2))

    def forward(self, x, y):
        hidden = self.first(x)
        nothing = sum(block(hidden).sum() for block in self.blocks)
        return torch.nn.functional.mse_loss(hidden.sum(dim=1, keepdim=True) + nothing, y)


# The decay is given: what DeepSpeed takes when it is not is not what torch takes.
ADAMW = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}
KINDS = (EmptyAtTheEnd, EmptyInTheMiddle, EmptyInUse, OnlyEmptyBlocks)


def make(kind):
    torch.manual_seed(0)
    return kind()


def train_empty(kind):
    import shardledger as sl

    found = {}
    rank, world = place()
    part = micro_batches(numbers(12, 4), rank, world, 1)[0]
    with group(30):
        for stage in STAGES:
            settings = config(stage, optimizer="AdamW", optimizer_params=ADAMW)
            settings["train_micro_batch_size_per_gpu"] = len(part[0])
            engine, optimizer, _, _ = sl.initialize(model=make(kind), config=settings)
            for _ in range(3):
                engine.backward(engine(*part))
                engine.step()
            sizes = [p.numel() for g in optimizer.param_groups for p in g["params"]]
            shapes = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
            found[stage] = (engine.state_dict(), sizes, shapes)
            engine.destroy()
    return found


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_models_with_empty_parameters_train_as_in_torch(kind, world):
    adamw = make_optimizer("AdamW", **ADAMW)
    right = reference(make(kind), numbers(12, 4), adamw, steps=3).weights
    shapes = {name: tuple(p.shape) for name, p in make(kind).named_parameters()}
    for rank, found in enumerate(run_ranks(train_empty, world, kind)):
        for stage, (weights, sizes, our_shapes) in found.items():
            assert 0 not in sizes, f"stage {stage}: the optimizer was given a parameter without elements"
            assert our_shapes == shapes, f"stage {stage}"
            if rank == 0:
                assert largest_difference(weights, right) <= 1e-5, f"stage {stage}"
