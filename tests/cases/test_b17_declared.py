"""B17: experts that not every rank uses. Declared a leaf, the mixture equals the dense model at every stage."""

import pytest
import torch
from torch import nn

from support.models import numbers
from support.oracle import largest_difference, micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
OPTIONS = {"SGD": {"lr": 0.05}, "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}
STEPS = 4


class Expert(nn.Module):
    """A block of its own: undeclared, each expert of the list is gathered when it runs."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Runs the experts that `route` [n] asks for, or, `dense`, every expert on every sample with a mask."""

    def __init__(self, experts=3):
        super().__init__()
        self.gate = nn.Linear(4, 1)
        self.experts = nn.ModuleList(Expert() for _ in range(experts))
        self.dense = False

    def forward(self, x, route):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if self.dense:
                out = out + expert(x) * chosen[:, None].to(x.dtype)
            elif chosen.any():
                rows = chosen.nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]))
        return out * torch.sigmoid(self.gate(x))


class Model(nn.Module):
    """A Linear, a mixture, and a head that a rank may call several times."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.mixture = Mixture()
        self.head = nn.Linear(4, 4)

    def forward(self, x, y, route, calls=1):
        x = self.mixture(torch.tanh(self.first(x)), route)
        for _ in range(calls):
            x = torch.tanh(self.head(x))
        return nn.functional.mse_loss(x.sum(dim=1, keepdim=True), y)


class Layers(nn.Module):
    """The mixture inside repeated blocks, as language models have it."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x, y, route, calls=1):
        for block in self.blocks:
            x = block(x, route)
        return nn.functional.mse_loss(x.sum(dim=1, keepdim=True), y)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mixture = Mixture()

    def forward(self, x, route):
        return x + self.mixture(self.norm(x), route)


MODELS = {"model": Model, "layers": Layers}


def make(name):
    torch.manual_seed(0)
    return MODELS[name]()


def routes(kind, rank, samples, step):
    """Which expert each sample of a rank takes; expert 2 is nobody's, except in "moving"."""
    if kind == "by rank":
        return torch.full((samples,), rank % 2)
    if kind == "moving":
        return torch.full((samples,), (rank + step) % 3)
    return torch.arange(samples) % 2 if rank == 0 else torch.ones(samples, dtype=torch.long)


def calls_of(kind, rank):
    return 3 if kind == "by rank" and rank == 1 else 1


def train_sparse(name, kind, optimizer, way, more):
    """Weights by stage; `way` is how the leaf is declared."""
    import shardledger as sl
    from shardledger.utils import set_z3_leaf_modules

    found = {}
    rank, world = place()
    part = micro_batches(numbers(12, 4), rank, world, 1)[0]
    with group(30):
        for stage in STAGES:
            model = make(name)
            zero = {"leaf_module": {"classes": ["Mixture"]}} if way == "config" else {}
            if way == "class":
                set_z3_leaf_modules(model, [Mixture])
            elif way == "name":
                set_z3_leaf_modules(model, ["Mixture"])
            settings = config(stage, optimizer=optimizer, optimizer_params=OPTIONS[optimizer], zero=zero, **more)
            settings["train_micro_batch_size_per_gpu"] = len(part[0])
            engine = sl.initialize(model=model, config=settings)[0]
            for step in range(STEPS):
                loss = engine(*part, routes(kind, rank, len(part[0]), step), calls_of(kind, rank))
                engine.backward(loss)
                engine.step()
            found[stage] = (engine.state_dict(), [unit.path for unit in engine.plan.units])
            engine.destroy()
    return found


def train_dense(name, kind, optimizer, world):
    """One process that runs every expert on every sample: experts without samples get gradients of zero."""
    model = make(name)
    for module in model.modules():
        if isinstance(module, Mixture):
            module.dense = True
    optim = getattr(torch.optim, optimizer)(model.parameters(), **OPTIONS[optimizer])
    for step in range(STEPS):
        optim.zero_grad()
        for rank in range(world):
            part = micro_batches(numbers(12, 4), rank, world, 1)[0]
            loss = model(*part, routes(kind, rank, len(part[0]), step), calls_of(kind, rank))
            (loss / world).backward()
        optim.step()
    return model.state_dict()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("kind", ["by rank", "mixed", "moving"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_declared_mixture_equals_the_dense_model(optimizer, kind, world):
    right = train_dense("model", kind, optimizer, world)
    found = run_ranks(train_sparse, world, "model", kind, optimizer, "class", {})[0]
    for stage, (weights, units) in found.items():
        assert units == ["", "mixture"], stage
        assert largest_difference(weights, right) <= 2e-6, f"stage {stage}"


@pytest.mark.parametrize("way", ["name", "config"])
def test_a_leaf_can_be_declared_by_name_and_in_the_configuration(way):
    right = train_dense("model", "by rank", "AdamW", 2)
    for stage, (weights, units) in run_ranks(train_sparse, 2, "model", "by rank", "AdamW", way, {})[0].items():
        assert units == ["", "mixture"], stage
        assert largest_difference(weights, right) <= 2e-6, f"stage {stage}"


@pytest.mark.parametrize("recompute", [False, True])
def test_a_mixture_inside_repeated_blocks_is_part_of_its_block(recompute):
    right = train_dense("layers", "moving", "AdamW", 2)
    more = {"shardledger": {"activation_checkpointing": recompute}}
    for stage, (weights, units) in run_ranks(train_sparse, 2, "layers", "moving", "AdamW", "class", more)[0].items():
        assert units == ["", "blocks.0", "blocks.1"], stage
        assert largest_difference(weights, right) <= 2e-6, f"stage {stage}"


def test_a_declared_leaf_can_be_recomputed():
    right = train_dense("model", "by rank", "SGD", 2)
    more = {"shardledger": {"activation_checkpointing": True}}
    for stage, (weights, _) in run_ranks(train_sparse, 2, "model", "by rank", "SGD", "class", more)[0].items():
        assert largest_difference(weights, right) <= 2e-6, f"stage {stage}"


def read_gradients_of_absent_experts():
    import shardledger as sl
    from shardledger.utils import safe_get_full_grad, set_z3_leaf_modules

    rank, world = place()
    part = micro_batches(numbers(12, 4), rank, world, 1)[0]
    found = {}
    with group(30):
        for stage in STAGES:
            model = make("model")
            set_z3_leaf_modules(model, [Mixture])
            settings = {**config(stage), "train_micro_batch_size_per_gpu": len(part[0])}
            engine = sl.initialize(model=model, config=settings)[0]
            engine.backward(engine(*part, routes("by rank", rank, len(part[0]), 0)))
            experts = model.mixture.experts
            found[stage] = [safe_get_full_grad(expert.up.weight) for expert in experts]
            held = [expert.up.weight.grad is not None for expert in experts]
            engine.destroy()
            assert held == [True] * 3
    return found


def test_experts_without_tokens_on_any_rank_have_a_gradient_of_zeros():
    for found in run_ranks(read_gradients_of_absent_experts, 2):
        for stage, (first, second, nobody) in found.items():
            assert first.abs().max() > 0 and second.abs().max() > 0, stage
            assert nobody.shape == (6, 4) and nobody.abs().max() == 0, stage
