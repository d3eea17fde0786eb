"""Declaring leaves on a model."""

import copy

import pytest
from torch import nn

import shardledger as sl
from shardledger.errors import EngineStateError, PlanError
from shardledger.utils import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from support.training import config


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))


class Wide(Moe):
    pass


def make():
    return nn.ModuleDict({"a": Moe(), "b": Wide(), "c": nn.Linear(3, 3)})


@pytest.mark.parametrize("wanted", [Moe, [Moe], [Moe, Wide], ["Moe", "Wide"], ["a", "b"], [f"{__name__}.Moe", Wide]])
def test_modules_are_declared_by_class_class_name_or_path(wanted):
    model = make()
    assert set_z3_leaf_modules(model, wanted) == [model["a"], model["b"]]
    assert get_z3_leaf_modules(model) == [model["a"], model["b"]]
    assert z3_leaf_module(model["a"]) and not z3_leaf_module(model["c"])
    assert unset_z3_leaf_modules(model, ["Wide"]) == [model["b"]]
    assert get_z3_leaf_modules(model) == [model["a"]]


def test_a_copy_of_a_model_has_its_leaves_and_nothing_else_is_written():
    model = make()
    before = set(model["a"].__dict__)
    set_z3_leaf_module(model["a"], True)
    assert len(set(model["a"].__dict__) - before) == 1
    assert get_z3_leaf_modules(copy.deepcopy(model))[0].experts is not model["a"].experts
    set_z3_leaf_module(model["a"], False)
    assert set(model["a"].__dict__) == before


def test_what_the_model_does_not_have_is_an_error_unless_it_may_be_missing():
    model = make()
    with pytest.raises(PlanError, match=r"'Mow' is no class.*Linear, ModuleDict, ModuleList, Moe, Wide"):
        set_z3_leaf_modules(model, [Moe, "Mow"])
    assert get_z3_leaf_modules(model) == []
    assert set_z3_leaf_modules(model, ["Mow"], raise_if_not_found=False) == []


def test_leaves_are_declared_before_initialize():
    model = make()
    engine = sl.initialize(model=model, config=config(2))[0]
    for change in (set_z3_leaf_modules, unset_z3_leaf_modules):
        with pytest.raises(EngineStateError, match=r"Moe into units\. Declare them first"):
            change(model, [Moe])
    engine.destroy()
    set_z3_leaf_modules(model, [Moe])
    engine = sl.initialize(model=model, config=config(3))[0]
    assert [unit.path for unit in engine.plan.units] == ["", "a", "b"]
    engine.destroy()
