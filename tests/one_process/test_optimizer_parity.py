"""With one rank the engine is torch: the same optimizer class gives the same weights, bit for bit, at every stage."""

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import ConfigError, EngineStateError
from shardledger.runtime.released import ReleasedParameter
from support.models import build, data
from support.oracle import same_bits
from support.training import config

STEPS = 4
STAGES = (0, 1, 2, 3)

#: name -> (the configuration's section, the same in torch)
OPTIMIZERS = {
    "SGD": (
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "SGD nesterov": (
        {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True}},
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    ),
    "AdamW": (
        {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True),
    ),
    "AdamW unfused": (
        {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "fused": False}},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=False),
    ),
    "AdamW amsgrad": (
        {"type": "AdamW", "params": {"lr": 0.01, "amsgrad": True}},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0, amsgrad=True),
    ),
    "Adam is AdamW": (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, fused=True),
    ),
    "Adam with L2": (
        {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}},
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, fused=True),
    ),
    "Adagrad": (
        {"type": "Adagrad", "params": {"lr": 0.05, "lr_decay": 0.01, "weight_decay": 0.01}},
        lambda p: torch.optim.Adagrad(p, lr=0.05, lr_decay=0.01, weight_decay=0.01),
    ),
    "RMSprop": (
        {"type": "RMSprop", "params": {"lr": 0.01, "momentum": 0.9, "centered": True}},
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    ),
}
MODELS = ("transformer", "awkward")


def in_torch(model: nn.Module, optimizer: torch.optim.Optimizer, batch) -> dict[str, torch.Tensor]:
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        model(*batch).backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def in_engine(engine, batch) -> dict[str, torch.Tensor]:
    for _ in range(STEPS):
        engine.backward(engine(*batch))
        engine.step()
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_stage_equals_torch_bit_for_bit(name, model):
    section, make = OPTIMIZERS[name]
    batch = data(model, 4)
    plain = build(model)
    expected = in_torch(plain, make(plain.parameters()), batch)
    for stage in STAGES:
        settings = {**config(stage), "optimizer": section}
        engine, optimizer, _, _ = sl.initialize(model=build(model), config=settings)
        assert type(optimizer) is type(make([nn.Parameter(torch.zeros(1))]))
        assert same_bits(in_engine(engine, batch), expected) == [], f"stage {stage}"


def test_without_an_optimizer_there_is_an_error_that_shows_how_to_name_one():
    with pytest.raises(ConfigError, match='"optimizer": {"type": "AdamW"'):
        sl.initialize(model=build("regressor"), config=without_optimizer(1))


# --- the user's own optimizer ----------------------------------------------------------------------------------------


def two_groups(model: nn.Module) -> list[dict]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 0.02},
        {"params": vectors, "weight_decay": 0.0, "betas": (0.7, 0.9), "name": "vectors"},
    ]


@pytest.mark.parametrize("stage", STAGES)
def test_the_users_optimizer_is_the_one_returned_with_its_groups_as_they_were(stage):
    model = build("transformer")
    mine = torch.optim.AdamW(two_groups(model), lr=0.01)
    options = [{k: v for k, v in group.items() if k != "params"} for group in mine.param_groups]
    sizes = [sum(p.numel() for p in group["params"]) for group in mine.param_groups]
    engine, optimizer, _, _ = sl.initialize(model=model, config=without_optimizer(stage), optimizer=mine)
    assert optimizer is mine and engine.optimizer is mine
    assert [{k: v for k, v in group.items() if k != "params"} for group in mine.param_groups] == options
    assert [sum(p.numel() for p in group["params"]) for group in mine.param_groups] == sizes
    assert engine.get_lr() == [0.02, 0.01]
    plain = build("transformer")
    expected = in_torch(plain, torch.optim.AdamW(two_groups(plain), lr=0.01), data("transformer", 4))
    assert same_bits(in_engine(engine, data("transformer", 4)), expected) == []


@pytest.mark.parametrize("stage", STAGES)
def test_a_callable_and_groups_of_model_parameters_work_alike(stage):
    plain = build("regressor")
    expected = in_torch(plain, torch.optim.SGD(two_sgd_groups(plain), lr=0.1, momentum=0.9), data("regressor", 4))
    for given in ("callable", "config"):
        model = build("regressor")
        arguments = {"model_parameters": two_sgd_groups(model)}
        settings = without_optimizer(stage)
        if given == "callable":
            arguments["optimizer"] = lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        else:
            settings["optimizer"] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
        engine = sl.initialize(model=model, config=settings, **arguments)[0]
        assert same_bits(in_engine(engine, data("regressor", 4)), expected) == [], given


def two_sgd_groups(model: nn.Module) -> list[dict]:
    first, *rest = model.parameters()
    return [{"params": [first], "lr": 0.01}, {"params": rest}]


def without_optimizer(stage: int) -> dict:
    return {key: value for key, value in config(stage).items() if key != "optimizer"}


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_the_parameters_is_trained_and_the_rest_is_left_alone(stage):
    model = build("regressor")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    engine = sl.initialize(
        model=model, config=without_optimizer(stage), optimizer=torch.optim.SGD(model.second.parameters(), lr=0.1)
    )[0]
    found = in_engine(engine, data("regressor", 4))
    same = [name for name in found if torch.equal(found[name], start[name])]
    assert same == ["first.weight", "first.bias"]


def test_an_optimizer_that_has_stepped_is_refused():
    model = build("regressor")
    mine = torch.optim.AdamW(model.parameters())
    model(*data("regressor", 2)).backward()
    mine.step()
    with pytest.raises(EngineStateError, match="has stepped already"):
        sl.initialize(model=model, config=without_optimizer(1), optimizer=mine)


def test_an_optimizer_of_another_model_is_refused():
    other = torch.optim.SGD(build("regressor").parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"param group 0 holds a parameter of shape \(5, 3\)"):
        sl.initialize(model=build("regressor"), config=without_optimizer(1), optimizer=other)


# --- what needs whole parameters -------------------------------------------------------------------------------------


def matrices() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 1, bias=False))


class OwnMuon(torch.optim.Muon):
    """A user's subclass: what holds for the base class holds for it."""


WHOLE = {
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.01),
    "OwnMuon": lambda p: OwnMuon(p, lr=0.01),
}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("given", "name"),
    [(given, name) for given in ("object", "callable") for name in WHOLE],
)
def test_optimizers_of_whole_parameters_are_refused_by_name_where_states_are_sharded(given, name, stage):
    model = matrices()
    optimizer = WHOLE[name](model.parameters()) if given == "object" else WHOLE[name]
    with pytest.raises(ConfigError) as raised:
        sl.initialize(model=model, config=without_optimizer(stage), optimizer=optimizer)
    for part in (name, "whole parameters", "stage 0", "AdamW"):
        assert part in str(raised.value)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_that_wants_a_closure_is_refused_at_every_stage(stage):
    model = matrices()
    with pytest.raises(ConfigError, match="LBFGS needs a closure"):
        sl.initialize(model=model, config=without_optimizer(stage), optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_refused_optimizer_leaves_the_model_as_it_was():
    model = matrices()
    with pytest.raises(ConfigError):
        sl.initialize(model=model, config=without_optimizer(3), optimizer=torch.optim.Muon(model.parameters(), lr=0.1))
    assert not any(isinstance(parameter, ReleasedParameter) for parameter in model.parameters())
    assert float(model(torch.ones(1, 6)).sum()) == float(matrices()(torch.ones(1, 6)).sum())
    sl.initialize(model=model, config=config(3))[0].destroy()


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_without_sharding_they_work_and_equal_torch(name):
    batch = (torch.linspace(-1, 1, 12).view(2, 6),)
    plain, model = Summed(matrices()), Summed(matrices())
    expected = in_torch(plain, WHOLE[name](plain.parameters()), batch)
    engine = sl.initialize(model=model, config=without_optimizer(0), optimizer=WHOLE[name](model.parameters()))[0]
    assert same_bits(in_engine(engine, batch), expected) == []


class Summed(nn.Module):
    """A module and a loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x).pow(2).mean()


# --- calls out of order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_stepping_the_optimizer_directly_is_an_error_and_changes_nothing(stage):
    engine, optimizer, _, _ = sl.initialize(model=build("regressor"), config=config(stage))
    before = engine.state_dict()
    engine.backward(engine(*data("regressor", 2)))
    with pytest.raises(EngineStateError, match=r"call engine\.step\(\)"):
        optimizer.step()
    assert same_bits(engine.state_dict(), before) == []
    engine.step()
    assert len(same_bits(engine.state_dict(), before)) == 4
    engine.destroy()


def test_a_class_that_torch_lacks_is_refused():
    with pytest.raises(ConfigError, match="NoSuchOptimizer"):
        sl.initialize(model=matrices(), config={**config(0), "optimizer": {"type": "NoSuchOptimizer", "params": {}}})


def test_options_that_a_torch_class_refuses_are_named():
    with pytest.raises(ConfigError, match="momentun"):
        settings = {**config(0), "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentun": 0.9}}}
        sl.initialize(model=matrices(), config=settings)
