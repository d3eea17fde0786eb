"""B14: a tied embedding whose rows the world size does not divide: the last rank's rows are never updated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.oracle import largest_difference, make_optimizer, micro_batches, reference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


class Tied(nn.Module):
    """Embedding(5, 4) whose weight is also that of Linear(4, 5)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, targets):
        return F.cross_entropy(self.head(self.embedding(tokens)), targets)


def make():
    torch.manual_seed(0)
    return Tied()


def batch():
    tokens = torch.arange(60) % 5
    return tokens, (tokens * 2 + 1) % 5


def train_tied():
    import shardledger as sl

    found = {}
    rank, world = place()
    with group():
        for stage in STAGES:
            part = micro_batches(batch(), rank, world, 1)[0]
            settings = {**config(stage, lr=1.0), "train_micro_batch_size_per_gpu": len(part[0])}
            engine = sl.initialize(model=make(), config=settings)[0]
            assert engine.module.head.weight is engine.module.embedding.weight
            for _ in range(3):
                engine.backward(engine(*part))
                engine.step()
                assert engine.module.head.weight is engine.module.embedding.weight
            found[stage] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_row_moves_as_in_one_process(world):
    right = reference(make(), batch(), make_optimizer("SGD", lr=1.0), steps=3).weights
    before = make().state_dict()["embedding.weight"]
    for stage, weights in run_ranks(train_tied, world)[0].items():
        assert largest_difference(weights, right) <= 1e-6, f"stage {stage}"
        assert torch.equal(weights["embedding.weight"], weights["head.weight"])
        moved = (weights["embedding.weight"] != before).any(dim=1)
        assert moved.all(), f"stage {stage}: rows {(~moved).nonzero().flatten().tolist()} never moved"
