"""A parameter whose values are elsewhere keeps its identity, shape and kind, and refuses everything else by name."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import EngineStateError, ReleasedParameterError
from shardledger.runtime import released
from support.models import Layer
from support.training import config

NAME = "blocks.3.weight"
ONES = torch.ones(4, 4)


def make(cls=nn.Parameter, shape=(4, 4), dtype=torch.float32, **options):
    """A released parameter; its class while it was whole is ``cls``."""
    parameter = cls(torch.zeros(shape, dtype=dtype), **options)
    released.release(parameter, NAME, released.placeholder(parameter.shape, dtype, parameter.device))
    return parameter


READS = {
    "add": lambda p: p + 1,
    "radd": lambda p: 1 + p,
    "mul by tensor": lambda p: ONES * p,
    "matmul": lambda p: p @ ONES,
    "rmatmul": lambda p: ONES @ p,
    "linear": lambda p: nn.functional.linear(ONES, p),
    "embedding": lambda p: nn.functional.embedding(torch.tensor([1]), p),
    "einsum": lambda p: torch.einsum("ij,jk->ik", ONES, p),
    "cat": lambda p: torch.cat([ONES, p]),
    "stack": lambda p: torch.stack((p, p)),
    "where": lambda p: torch.where(ONES > 0, p, ONES),
    "neg": lambda p: -p,
    "pow": lambda p: p**2,
    "compare": lambda p: p == 0,
    "allclose": lambda p: torch.allclose(p, ONES),
    "equal": lambda p: torch.equal(p, ONES),
    "sum": lambda p: p.sum(),
    "torch.sum": lambda p: torch.sum(p),
    "mean": lambda p: p.mean(),
    "std": lambda p: torch.std(p),
    "max": lambda p: p.max(),
    "norm": lambda p: p.norm(),
    "vector_norm": lambda p: torch.linalg.vector_norm(p),
    "isnan": lambda p: p.isnan().any(),
    "index": lambda p: p[0],
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p),
    "bool": lambda p: bool(p),
    "iterate": lambda p: list(p),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "clone": lambda p: p.clone(),
    "to": lambda p: p.to(torch.bfloat16),
    "half": lambda p: p.half(),
    "cpu": lambda p: p.cpu(),
    "contiguous": lambda p: p.contiguous(),
    "view": lambda p: p.view(-1),
    "reshape": lambda p: p.reshape(16),
    "transpose": lambda p: p.T,
    "expand": lambda p: p.expand(2, 4, 4),
    "unbind": lambda p: p.unbind(0),
    "split": lambda p: p.split(2),
    "zeros_like": lambda p: torch.zeros_like(p),
    "empty_like": lambda p: torch.empty_like(p),
    "new_zeros": lambda p: p.new_zeros(2),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "print format": lambda p: f"{p:.2f}",
    "backward": lambda p: p.backward(ONES),
}
WRITES = {
    "add_": lambda p: p.add_(1),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.fill_(1.0),
    "copy_": lambda p: p.copy_(ONES),
    "normal_": lambda p: nn.init.normal_(p),
    "uniform_": lambda p: p.uniform_(),
    "init.ones_": lambda p: nn.init.ones_(p),
    "clamp_": lambda p: p.clamp_(0, 1),
    "setitem": lambda p: p.__setitem__(0, 0.0),
    "iadd": lambda p: p.__iadd__(1),
    "data =": lambda p: setattr(p, "data", ONES),
    "data.fill_": lambda p: p.data.fill_(0),
    "out=": lambda p: torch.add(ONES, ONES, out=p),
    "copy from": lambda p: torch.empty(4, 4).copy_(p),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "resize_": lambda p: p.resize_(2),
    "masked_fill_": lambda p: p.masked_fill_(ONES > 0, 0.0),
    "lerp_": lambda p: p.lerp_(ONES, 0.5),
}


@pytest.mark.parametrize("way", [*READS, *WRITES])
def test_an_operation_is_refused_by_name(way):
    parameter = make()
    with pytest.raises(ReleasedParameterError) as raised, torch.no_grad():
        {**READS, **WRITES}[way](parameter)
    assert repr(NAME) in str(raised.value)
    assert isinstance(raised.value, EngineStateError)
    assert isinstance(parameter, released.ReleasedParameter) and parameter.shape == (4, 4)


def test_setting_the_storage_is_refused():
    with pytest.raises(ReleasedParameterError, match=NAME), torch.no_grad():
        make().set_(ONES)


def test_the_message_names_the_operation_and_the_cures():
    with pytest.raises(ReleasedParameterError) as raised:
        torch.matmul(ONES, make())
    for part in ("'matmul'", "engine.state_dict()", '"shardledger": {"units"', "stage3_param_persistence_threshold"):
        assert part in str(raised.value)


def test_what_concerns_shape_and_kind_is_answered():
    parameter = make(shape=(3, 5), dtype=torch.bfloat16)
    assert parameter.shape == parameter.size() == torch.Size([3, 5]) and parameter.size(1) == 5
    assert parameter.numel() == parameter.nelement() == torch.numel(parameter) == 15
    assert parameter.dim() == parameter.ndim == parameter.ndimension() == 2 and len(parameter) == 3
    assert parameter.dtype == torch.bfloat16 and parameter.element_size() == 2 and parameter.nbytes == 30
    assert parameter.device == torch.device("cpu") and not parameter.is_cuda and not parameter.is_meta
    assert parameter.is_floating_point() and not parameter.is_complex() and not parameter.is_sparse
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad is None and parameter.grad_fn is None
    assert hash(parameter) == id(parameter) and parameter in {parameter}
    parameter.grad = None


def test_it_is_a_parameter_to_everyone_who_asks():
    parameter = make()
    assert isinstance(parameter, nn.Parameter) and isinstance(parameter, torch.Tensor)
    assert not make(requires_grad=False).requires_grad
    module = nn.Linear(4, 4, bias=False)
    module.weight = parameter
    assert list(module.parameters()) == [parameter]
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == 16


def test_it_can_be_shown():
    assert repr(make()) == f"ReleasedParameter({NAME!r}, shape=(4, 4), dtype=torch.float32)"
    assert NAME in str([make()])


class Tagged(nn.Parameter):
    """A user's own subclass of Parameter, with an attribute."""


@pytest.mark.parametrize("cls", [nn.Parameter, Tagged])
def test_restoring_gives_back_class_identity_attributes_and_values(cls):
    parameter = cls(torch.zeros(2, 3))
    parameter.no_decay = True
    before = id(parameter)
    for round_ in range(3):
        released.release(parameter, NAME, released.placeholder((2, 3), torch.float32, parameter.device))
        assert isinstance(parameter, released.ReleasedParameter) and parameter.no_decay
        values = torch.full((2, 3), float(round_))
        released.restore(parameter, values)
        assert type(parameter) is cls and id(parameter) == before and parameter.no_decay
        assert parameter.data_ptr() == values.data_ptr() and float(parameter.detach().sum()) == 6 * round_
        assert set(vars(parameter)) == {"no_decay"}


def test_releasing_twice_keeps_the_class_to_restore():
    parameter = make(Tagged)
    released.release(parameter, "again", released.placeholder((4, 4), torch.float32, parameter.device))
    assert NAME in repr(parameter)
    released.restore(parameter, ONES)
    assert type(parameter) is Tagged


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,)])
def test_any_shape_can_be_released(shape):
    parameter = make(shape=shape)
    assert parameter.shape == shape and parameter.numel() == math.prod(shape)
    with pytest.raises(ReleasedParameterError, match=NAME):
        parameter.sum()


def test_below_python_it_reads_poison_of_one_element():
    assert bool(torch.tensor(make()).isnan().all()), "the constructor copies without asking the class"
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        stand_in = released.placeholder((1000, 1000), dtype, torch.device("cpu"))
        assert stand_in.untyped_storage().nbytes() == dtype.itemsize
        assert bool(stand_in.isnan().all())
    codes = make(shape=(8,), dtype=torch.uint8, requires_grad=False)
    assert codes.dtype == torch.uint8
    with pytest.raises(ReleasedParameterError, match=NAME):
        codes.sum()


# --- in an engine ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two blocks; its weights are of a user's class. Batch x[n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(4) for _ in range(2))
        for layer in self.layers:
            layer.linear.weight = Tagged(layer.linear.weight.detach())
        self.seen: list[type] = []

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            self.seen.append(type(layer.linear.weight))
        return x.pow(2).mean()


@pytest.fixture
def engine():
    torch.manual_seed(0)
    made = sl.initialize(model=Net(), config=config(3))[0]
    yield made
    made.destroy()


def test_between_passes_the_engine_releases_and_inside_a_unit_the_class_is_the_users(engine):
    weight = engine.module.layers[0].linear.weight
    inside = []
    engine.module.layers[0].linear.register_forward_hook(lambda module, *_: inside.append(type(module.weight)))
    assert isinstance(weight, released.ReleasedParameter)
    engine.backward(engine(torch.ones(2, 4)))
    engine.step()
    assert inside == [Tagged]
    assert engine.module.seen == [released.ReleasedParameter] * 2
    assert isinstance(weight, released.ReleasedParameter)
    assert engine.module.layers[0].linear.weight is weight


@pytest.mark.parametrize(
    "way",
    [
        lambda module: module.state_dict(),
        lambda module: copy.deepcopy(module),
        lambda module: module.half(),
        lambda module: module.layers[0].linear(torch.ones(1, 4)),
        lambda module: nn.utils.parameters_to_vector(module.parameters()),
    ],
    ids=["state_dict", "deepcopy", "half", "a part of a unit", "parameters_to_vector"],
)
def test_what_reads_a_whole_module_is_refused_with_a_parameter_name(engine, way):
    before = engine.state_dict()
    with pytest.raises(ReleasedParameterError, match=r"layers\.0\.linear\.(weight|bias)"):
        way(engine.module)
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert math.isfinite(float(engine(torch.ones(2, 4)).detach()))


def test_loading_a_state_dict_into_the_module_is_refused_and_changes_nothing(engine):
    before = engine.state_dict()
    with pytest.raises((RuntimeError, ReleasedParameterError), match=r"layers\.0\.linear"):
        engine.module.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    after = engine.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
