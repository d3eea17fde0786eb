"""B16: parameters that get no gradient: a hang, a KeyError, or a step that torch would not take."""

import pytest
import torch
from torch import nn

from support.models import TwoHeads, numbers
from support.oracle import largest_difference, micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
ADAMW = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-4}
STEPS = 4


class WithUnused(nn.Module):
    """Blocks of which one is never called, and a Linear that is never used."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.unused = nn.Linear(6, 4)
        self.head = nn.Linear(6, 1)

    def forward(self, x, y, which=0):
        return torch.nn.functional.mse_loss(self.head(self.blocks[2](self.blocks[0](x))), y)


def make(kind):
    torch.manual_seed(0)
    return WithUnused() if kind == "unused" else TwoHeads()


def head_of(kind, step, rank):
    return {"unused": 0, "alternate": step % 2, "by rank": rank % 2, "one rank only": min(rank, 1)}[kind]


def train_heads(kind, optimizer, options):
    import shardledger as sl

    found = {}
    rank, world = place()
    with group(30):
        for stage in STAGES:
            settings = config(stage, optimizer=optimizer, optimizer_params=options)
            part = micro_batches(numbers(12, 6), rank, world, 1)[0]
            settings["train_micro_batch_size_per_gpu"] = len(part[0])
            engine = sl.initialize(model=make(kind), config=settings)[0]
            for step in range(STEPS):
                engine.backward(engine(*part, head_of(kind, step, rank)))
                engine.step()
            found[stage] = engine.state_dict()
            engine.destroy()
    return found


def train_plainly(kind, world, optimizer, options):
    """One process; a head that any rank used has a gradient, and a rank that did not counts as zero."""
    model = make(kind)
    optim = getattr(torch.optim, optimizer)(model.parameters(), **options)
    for step in range(STEPS):
        optim.zero_grad(set_to_none=True)
        for rank in range(world):
            part = micro_batches(numbers(12, 6), rank, world, 1)[0]
            (model(*part, head_of(kind, step, rank)) / world).backward()
        optim.step()
    return model.state_dict()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["unused", "alternate", "by rank", "one rank only"])
def test_parameters_without_gradient_are_left_alone_as_torch_does(kind, world):
    right = train_plainly(kind, world, "AdamW", ADAMW)
    for stage, weights in run_ranks(train_heads, world, kind, "AdamW", ADAMW)[0].items():
        assert largest_difference(weights, right) <= 1e-5, f"stage {stage}"


def test_momentum_does_not_move_what_has_no_gradient():
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    right = train_plainly("alternate", 2, "SGD", options)
    for stage, weights in run_ranks(train_heads, 2, "alternate", "SGD", options)[0].items():
        assert largest_difference(weights, right) <= 1e-6, f"stage {stage}"


class TwoWeights(nn.Module):
    """Weights 1 and 1; each call uses one."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, which):
        return self.weights[which].sum()


def use_one_then_the_other():
    import shardledger as sl

    found = {}
    with group(30):
        for stage in STAGES:
            settings = config(stage, optimizer="AdamW", optimizer_params={"lr": 0.1, "weight_decay": 0.1})
            engine = sl.initialize(model=TwoWeights(), config=settings)[0]
            for which in (0, 1):
                engine.backward(engine(which))
                engine.step()
            found[stage] = [float(value) for value in engine.state_dict(all_ranks=True).values()]
            engine.destroy()
    return found


def test_a_weight_stays_where_its_last_gradient_left_it():
    for found in run_ranks(use_one_then_the_other, 2):
        for stage, values in found.items():
            assert values == pytest.approx([0.89, 0.89], abs=1e-5), f"stage {stage}: 0.8141 is the flat zero gradient"


def no_gradient_in_any_micro_step_but_one():
    """Accumulation: the head is used in one of the micro-steps, and not at all in the next step."""
    import shardledger as sl

    found = {}
    rank, world = place()
    micro = micro_batches(numbers(12, 6), rank, world, 3)
    with group(30):
        for stage in STAGES:
            settings = config(stage, optimizer="AdamW", optimizer_params=ADAMW, accumulation=3)
            settings["train_micro_batch_size_per_gpu"] = len(micro[0][0])
            engine = sl.initialize(model=make("alternate"), config=settings)[0]
            for step in range(2):
                for index, part in enumerate(micro):
                    engine.backward(engine(*part, 1 if step == 0 and index == 1 else 0))
                    engine.step()
            found[stage] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_accumulation_remembers_which_parameters_had_a_gradient(world):
    model = make("alternate")
    optim = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        optim.zero_grad(set_to_none=True)
        for rank in range(world):
            for index, part in enumerate(micro_batches(numbers(12, 6), rank, world, 3)):
                (model(*part, 1 if step == 0 and index == 1 else 0) / (3 * world)).backward()
        optim.step()
    for stage, weights in run_ranks(no_gradient_in_any_micro_step_but_one, world)[0].items():
        assert largest_difference(weights, model.state_dict()) <= 1e-5, f"stage {stage}"
