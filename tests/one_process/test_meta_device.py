"""A model born on the meta device is initialised unit by unit by its modules' reset_parameters, or refused by name."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardledger as sl
from shardledger.errors import PlanError
from support.models import Layer, Transformer, tokens
from support.training import config

STAGES = (0, 1, 2, 3)


def on_meta(make) -> nn.Module:
    with torch.device("meta"):
        return make()


def engine_of(make, stage=3, **more):
    torch.manual_seed(0)
    model = on_meta(make)
    assert all(p.is_meta for p in model.parameters())
    return sl.initialize(model=model, config=config(stage, **more))[0]


class Frequencies(nn.Module):
    """No parameters; buffers that ``reset_parameters`` fills, one of them not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.inv_freq.copy_(1.0 / 10 ** torch.arange(4.0))
            self.count.fill_(7)

    def forward(self, x):
        return x * self.inv_freq


class Scaled(nn.Module):
    """A parameter and a buffer of one module; ``reset`` says what its reset_parameters sets."""

    reset = ("weight", "gain")

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.register_buffer("gain", torch.full((4,), 2).to(dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in self.reset:
            with torch.no_grad():
                getattr(self, name).fill_(2)

    def forward(self, x):
        return x * self.weight * self.gain


class WeightOnly(Scaled):
    reset = ("weight",)


class GainOnly(Scaled):
    reset = ("gain",)


class Net(nn.Module):
    """Whatever module stands between an input [n, 4] and a loss."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for module in self.inner:
            x = module(x)
        return self.head(x).pow(2).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_and_keeps_the_structure_of_the_model(stage, precision):
    engine = engine_of(Transformer, stage, precision=precision, lr=0.5)
    before = engine.state_dict()
    assert list(before) == list(Transformer().state_dict())
    assert all(bool(value.isfinite().all()) and value.device.type == "cpu" for value in before.values())
    assert torch.equal(before["norm.weight"], torch.ones(10)) and torch.equal(before["norm.bias"], torch.zeros(10))
    assert 0.01 < float(before["position"].std()) < 0.03
    assert before["head.weight"] is before["embedding.weight"]
    assert float(before["blocks.0.mix.weight"].abs().max()) <= 10**-0.5
    losses = []
    for _ in range(10):
        loss = engine(*tokens(4))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.2
    engine.destroy()


def test_stages_draw_the_same_values():
    weights = []
    for stage in STAGES:
        engine = engine_of(Transformer, stage)
        weights.append(engine.state_dict())
        engine.destroy()
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in other)


def test_blocks_are_drawn_independently():
    engine = engine_of(Transformer)
    weights = engine.state_dict()
    assert not torch.equal(weights["blocks.0.mix.weight"], weights["blocks.1.mix.weight"])
    engine.destroy()


def test_frozen_parameters_stay_frozen_and_are_initialised():
    def make():
        net = Net(Layer(4), Layer(4))
        net.inner.requires_grad_(False)
        return net

    engine = engine_of(make)
    before = engine.state_dict()
    assert [p.requires_grad for p in engine.module.parameters()] == [False] * 4 + [True] * 2
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    after = engine.state_dict()
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert changed == ["head.weight", "head.bias"]
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_buffers_are_filled_by_reset_parameters_and_keep_their_dtype(stage):
    engine = engine_of(lambda: Net(Frequencies(), Scaled()), stage)
    frequencies, scaled = engine.module.inner
    assert torch.allclose(frequencies.inv_freq, torch.tensor([1.0, 0.1, 0.01, 0.001]))
    assert int(frequencies.count) == 7 and frequencies.count.dtype == torch.int64
    assert scaled.gain.tolist() == [2.0] * 4
    state = engine.state_dict()
    assert "inner.0.count" in state and "inner.0.inv_freq" not in state
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_nothing_initialises_is_refused_by_name(stage):
    with pytest.raises(PlanError) as raised:
        engine_of(lambda: Net(GainOnly()), stage)
    for part in ("'inner.0.weight'", "meta device", "GainOnly.reset_parameters", "build the model on the CPU"):
        assert part in str(raised.value)


class Bare(nn.Module):
    """No reset_parameters at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain


def test_a_module_without_reset_parameters_is_refused_by_name():
    with pytest.raises(PlanError, match=r"'inner\.0\.gain'.*Bare"):
        engine_of(lambda: Net(Bare()))


class BareBuffer(nn.Module):
    """A buffer and no reset_parameters."""

    def __init__(self, dtype=torch.float32) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4).to(dtype))

    def forward(self, x):
        return x + self.table


def test_a_buffer_that_nothing_initialises_is_refused_by_name():
    with pytest.raises(PlanError, match=r"buffer 'inner\.0\.table'.*BareBuffer"):
        engine_of(lambda: Net(BareBuffer()))


def test_a_buffer_beside_an_initialised_parameter_is_refused_by_name():
    with pytest.raises(PlanError, match=r"buffer 'inner\.0\.gain'.*WeightOnly"):
        engine_of(lambda: Net(WeightOnly()))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_an_integer_buffer_that_nothing_initialises_is_refused_and_not_zero(dtype):
    with pytest.raises(PlanError, match=r"buffer 'inner\.0\.table'"):
        engine_of(lambda: Net(BareBuffer(dtype)))


class Shared(nn.Module):
    """Two blocks that share a weight (which so lies in the root unit) and have biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(4) for _ in range(2))
        self.blocks[1].linear.weight = self.blocks[0].linear.weight

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_whose_parameters_lie_in_two_units_is_drawn_once(stage, precision):
    engine = engine_of(Shared, stage, precision=precision)
    weight = engine.module.blocks[0].linear.weight
    assert weight is engine.module.blocks[1].linear.weight
    with sl.GatheredParameters([weight]):
        held = weight.detach().float().clone()
    master = engine.state_dict()["blocks.0.linear.weight"]
    assert torch.allclose(held, master, rtol=2**-7, atol=0), "the weights computed with are not those of the masters"
    engine.backward(engine(torch.ones(2, 4, dtype=weight.dtype)))
    engine.step()
    engine.destroy()
