"""Modules that are never cut into units."""

import pytest

from shardledger.config import load_config
from shardledger.errors import PlanError
from shardledger.plan.build import build_plan
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec
from shardledger.plan.units import find_units, leaf_paths


def module(path, class_name, *parameters, container="", leaf=False) -> ModuleSpec:
    return ModuleSpec(
        path=path, class_name=class_name, container=container, composite=True, parameters=parameters, leaf=leaf
    )


def mixture(*, leaf: bool = False) -> ModelSpec:
    """A gate and two composite experts below ``moe``, beside a head."""
    modules = (
        module("", "Net", "gate", "e0", "e1", "head"),
        module("moe", "Moe", "gate", "e0", "e1", leaf=leaf),
        module("moe.experts", "ModuleList", "e0", "e1"),
        module("moe.experts.0", "Expert", "e0", container="list"),
        module("moe.experts.1", "Expert", "e1", container="list"),
    )
    names = ("gate", "e0", "e1", "head")
    parameters = tuple(ParameterSpec(name=name, shape=(4,), dtype="float32", trainable=True) for name in names)
    return ModelSpec(class_name="Net", parameters=parameters, modules=modules)


WHOLE = (("", ("head",)), ("moe", ("gate", "e0", "e1")))


def section(**keys):
    return load_config({"zero_optimization": {"leaf_module": keys}}).zero_optimization.leaf_module


def test_without_a_declaration_the_experts_are_units():
    assert [path for path, _ in find_units(mixture())] == ["", "moe.experts.0", "moe.experts.1"]


def test_a_leaf_is_one_unit_with_everything_below_it():
    assert find_units(mixture(), None, ["moe"]) == WHOLE
    assert find_units(mixture(), ["Expert"], ["moe"]) == WHOLE
    assert find_units(mixture(), [], ["moe"]) == WHOLE


def test_a_leaf_inside_a_unit_belongs_to_it():
    assert find_units(mixture(), ["Moe"], ["moe.experts.1"]) == WHOLE
    assert [path for path, _ in find_units(mixture(), [], ["moe.experts.1"])] == ["", "moe.experts.1"]


def test_a_model_that_is_a_leaf_is_one_unit():
    assert find_units(mixture(), None, [""]) == (("", ("gate", "e0", "e1", "head")),)


@pytest.mark.parametrize(
    "keys",
    [
        {"classes": ["Moe"]},
        {"classes": ["some.library.models.Moe"]},
        {"names": ["moe"]},
        {"name_suffixes": ["oe"]},
    ],
)
def test_the_configuration_declares_leaves_by_class_path_and_ending(keys):
    assert leaf_paths(mixture(), section(**keys)) == ("moe",)


def test_what_was_declared_in_the_model_and_in_the_configuration_adds_up():
    assert leaf_paths(mixture(leaf=True), section(names=["moe.experts.1"])) == ("moe", "moe.experts.1")
    assert leaf_paths(mixture(leaf=True), None) == ("moe",)
    assert leaf_paths(mixture(), None) == ()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"classes": ["Moa"]}, r"leaf_module\.classes: .*'Moa'.*mean 'Moe'"),
        ({"names": ["moe.expert"]}, r"leaf_module\.names: .*'moe\.expert'.*mean 'moe\.experts'"),
        ({"name_suffixes": [".router"]}, r"leaf_module\.name_suffixes: .*'\.router'"),
    ],
)
def test_a_declaration_that_means_no_module_is_an_error(keys, expected):
    with pytest.raises(PlanError, match=expected):
        leaf_paths(mixture(), section(**keys))


def test_the_plan_says_which_parameters_get_gradients_together_and_ranks_compare_it():
    plain = build_plan(load_config({}), mixture(), world=2)
    declared = build_plan(load_config({}), mixture(leaf=True), world=2)
    assert (plain.leaves, declared.leaves) == ((), (("gate", "e0", "e1"),))
    assert plain.fingerprint != declared.fingerprint


def test_the_section_survives_being_written_and_read_again():
    config = load_config({"zero_optimization": {"leaf_module": {"classes": ["Moe"]}}})
    assert load_config(config.to_dict()) == config
    assert load_config(config.to_dict()).zero_optimization.leaf_module.classes == ("Moe",)
