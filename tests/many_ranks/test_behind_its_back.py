"""What a user does to the module after initialize is taken over or refused by name, never trained past."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.ranks import run_ranks
from support.training import group, place


class Block(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(6, 2)

    def hidden(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x, y):
        return F.mse_loss(self.head(self.hidden(x)), y)


class Penalised(Net):
    """A gradient penalty: a backward pass inside forward, and a second one over its graph."""

    def forward(self, x, y):
        x = x.clone().requires_grad_()
        out = self.head(self.hidden(x))
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(self.head(self.hidden(x)), y) + 0.1 * gradient.pow(2).mean()


class Namespaced(Net):
    def forward(self, x, y):
        return SimpleNamespace(loss=super().forward(x, y))


class Quiet(Block):
    """A block that returns nothing."""

    def forward(self, x, found):
        found.append(super().forward(x))


class Collecting(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Quiet() for _ in range(3))

    def hidden(self, x):
        found = [self.inp(x)]
        for block in self.blocks:
            block(found[-1], found)
        return found[-1]


class TiedAcross(Net):
    """A parameter of a block that a module outside every block uses, too."""

    def __init__(self):
        super().__init__()
        self.pre = nn.Linear(6, 6)
        self.blocks[1].linear.weight = self.pre.weight

    def hidden(self, x):
        x = self.pre(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return x


MODELS = {"penalised": Penalised, "namespaced": Namespaced, "collecting": Collecting, "tied across": TiedAcross}


def make(cls):
    torch.manual_seed(0)
    return cls()


def data(world, rank=None):
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(4 * world, 4, generator=numbers), torch.randn(4 * world, 2, generator=numbers)
    return (x, y) if rank is None else (x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4])


def keys(stage, **more):
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def loss_of(output):
    return getattr(output, "loss", output)


def odd_models():
    import shardledger as sl

    rank, world = place()
    worst = {}
    with group(30):
        for name, cls in MODELS.items():
            plain = make(cls)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                for other in range(world):
                    (loss_of(plain(*data(world, other))) / world).backward()
                optimizer.step()
            expected = plain.state_dict()
            for stage in range(4):
                engine = sl.initialize(model=make(cls), config=keys(stage))[0]
                for _ in range(3):
                    engine.backward(loss_of(engine(*data(world, rank))))
                    engine.step()
                found = engine.state_dict(all_ranks=True)
                worst[name, stage] = max(float((found[k] - expected[k]).abs().max()) for k in expected)
                engine.destroy()
    return worst


@pytest.mark.parametrize("world", [1, 2])
def test_unusual_outputs_penalties_and_ties_equal_plain_torch(world):
    for worst in run_ranks(odd_models, world, timeout=90):
        assert {key: value for key, value in worst.items() if value > 1e-6} == {}


CHANGES = {
    "replaced": lambda m: setattr(m, "head", nn.Linear(6, 2)),
    "other memory": lambda m: setattr(m.head.weight, "data", torch.zeros(2, 6)),
    "added": lambda m: setattr(m, "extra", nn.Linear(2, 2)),
    "vector": lambda m: nn.utils.vector_to_parameters(
        torch.zeros(sum(p.numel() for p in m.parameters())), m.parameters()
    ),
}


def changes():
    import shardledger as sl

    rank, world = place()
    found = {}
    with group(30):
        for name, change in CHANGES.items():
            for stage in range(4):
                engine = sl.initialize(model=make(Net), config=keys(stage))[0]
                try:
                    change(engine.module)
                    engine(*data(world, rank))
                    found[name, stage] = ""
                except (sl.EngineStateError, sl.ReleasedParameterError) as error:
                    found[name, stage] = str(error)
                engine.destroy()
    return found


def test_a_parameter_that_is_replaced_rebound_or_added_is_refused_by_name():
    for found in run_ranks(changes, 2, timeout=60):
        for key, message in found.items():
            assert "parameter '" in message, key


def edits():
    import shardledger as sl

    rank, world = place()
    found = {}
    with group(30):
        for precision in ({}, {"bf16": {"enabled": True}}):
            for stage in range(3):
                engine = sl.initialize(model=make(Net), config=keys(stage, **precision))[0]
                with torch.no_grad():
                    engine.module.head.weight.fill_(0.25)
                engine.backward(engine(*data(world, rank)).float())
                found[stage, bool(precision)] = float(engine.state_dict(all_ranks=True)["head.weight"].mean())
                engine.destroy()
        for stage in range(4):
            for precision in ({}, {"bf16": {"enabled": True}}):
                engine = sl.initialize(model=make(Net), config=keys(stage, **precision))[0]
                new = {key: torch.full_like(value, 0.3) for key, value in make(Net).state_dict().items()}
                engine.load_state_dict(new if rank == 0 else {})
                loaded = engine.state_dict(all_ranks=True)
                assert all(torch.equal(loaded[key], new[key]) for key in new)
                with pytest.raises(sl.EngineStateError, match=r"head\.weight|rank 0 found"):
                    engine.load_state_dict({**new, "head.weight": torch.zeros(3, 3)})
                engine.destroy()
    return found


def test_edits_of_resident_weights_and_loaded_weights_reach_the_masters():
    for found in run_ranks(edits, 2, timeout=60):
        assert set(found.values()) == {0.25}


def calls_in_the_wrong_place():
    import shardledger as sl

    rank, world = place()
    with group(30):
        for stage in range(4):
            model = make(Net)
            engine = sl.initialize(model=model, config=keys(stage))[0]
            with pytest.raises(sl.EngineStateError, match="belongs to an engine already"):
                sl.initialize(model=model, config=keys(stage))
            with sl.GatheredParameters(model, modifier_rank=0):
                engine.backward(engine(*data(world, rank)))
                with pytest.raises(sl.EngineStateError, match="inside GatheredParameters"):
                    engine.step()
            engine.zero_grad()
            before = engine.state_dict(all_ranks=True)
            with pytest.raises(KeyError), sl.GatheredParameters(model, modifier_rank=0), torch.no_grad():
                model.head.weight.fill_(9.0)
                raise KeyError
            after = engine.state_dict(all_ranks=True)
            assert all(torch.equal(before[key], after[key]) for key in before)
            first, second = engine(*data(world, rank)), engine(*data(world, rank))
            engine.backward(first)
            engine.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation|updated since"):
                engine.backward(second)
            engine.destroy()
    return True


def test_calls_in_the_wrong_place_are_refused():
    assert run_ranks(calls_in_the_wrong_place, 2, timeout=60) == [True, True]


def persistent_bits():
    import shardledger as sl

    rank, world = place()
    found = []
    with group(30):
        for stage in range(4):
            config = keys(stage, optimizer={"type": "AdamW", "params": {"lr": 0.1}})
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 6
            engine = sl.initialize(model=make(Net), config=config)[0]
            for _ in range(5):
                engine.backward(engine(*data(world, rank)))
                engine.step()
            weights = engine.state_dict(all_ranks=True)
            found.append((engine.get_global_grad_norm(), [w.flatten().tolist() for w in weights.values()]))
            engine.destroy()
    return all(other == found[0] for other in found)


@pytest.mark.parametrize("world", [2, 4])
def test_stages_are_bitwise_equal_with_persistent_parameters(world):
    assert run_ranks(persistent_bits, world, timeout=60) == [True] * world
