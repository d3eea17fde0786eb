"""Which parameters are gathered and reduced together."""

import pytest

from shardledger.errors import PlanError
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec
from shardledger.plan.units import find_units


def module(path, class_name, *parameters, container="", composite=True) -> ModuleSpec:
    return ModuleSpec(path=path, class_name=class_name, container=container, composite=composite, parameters=parameters)


def model(*modules: ModuleSpec, root: tuple[str, ...] = (), class_name: str = "Net") -> ModelSpec:
    """A model of these modules; its parameters are theirs in order of first mention, then ``root``."""
    names = tuple(dict.fromkeys([name for m in modules for name in m.parameters] + list(root)))
    specs = tuple(ParameterSpec(name=name, shape=(4,), dtype="float32", trainable=True) for name in names)
    whole = ModuleSpec(path="", class_name=class_name, container="", composite=True, parameters=names)
    return ModelSpec(class_name=class_name, parameters=specs, modules=(whole, *modules))


def test_repeated_composite_blocks_of_a_list_are_units():
    spec = model(
        module("blocks", "ModuleList", "a", "b"),
        module("blocks.0", "Block", "a", container="list"),
        module("blocks.1", "Block", "b", container="list"),
        root=("embed", "head"),
    )
    assert find_units(spec) == (("", ("embed", "head")), ("blocks.0", ("a",)), ("blocks.1", ("b",)))


def test_leaves_of_a_list_stay_in_the_root_because_a_step_may_call_one_of_them():
    spec = model(
        module("heads.0", "Linear", "a", container="list", composite=False),
        module("heads.1", "Linear", "b", container="list", composite=False),
    )
    assert find_units(spec) == (("", ("a", "b")),)


def test_repeated_leaves_of_a_sequential_are_units_and_single_ones_are_not():
    spec = model(
        module("net.0", "Linear", "a", container="sequential", composite=False),
        module("net.1", "ReLU", container="sequential", composite=False),
        module("net.2", "Linear", "b", container="sequential", composite=False),
        module("net.3", "LayerNorm", "c", container="sequential", composite=False),
    )
    assert find_units(spec) == (("", ("c",)), ("net.0", ("a",)), ("net.2", ("b",)))


def test_modules_without_parameters_are_no_units_even_when_repeated():
    spec = model(
        module("net.0", "ReLU", container="sequential", composite=False),
        module("net.1", "ReLU", container="sequential", composite=False),
        root=("w",),
    )
    assert find_units(spec) == (("", ("w",)),)


def test_only_the_outermost_repeated_blocks_are_units():
    spec = model(
        module("blocks.0", "Block", "a", "b", container="list"),
        module("blocks.0.mlp.0", "Linear", "a", container="sequential", composite=False),
        module("blocks.0.mlp.1", "Linear", "b", container="sequential", composite=False),
        module("blocks.1", "Block", "c", "d", container="list"),
        module("blocks.1.mlp.0", "Linear", "c", container="sequential", composite=False),
        module("blocks.1.mlp.1", "Linear", "d", container="sequential", composite=False),
    )
    assert find_units(spec) == (("", ()), ("blocks.0", ("a", "b")), ("blocks.1", ("c", "d")))


def test_siblings_count_not_namesakes_elsewhere():
    """One block in each of two lists: neither has a sibling of its class."""
    spec = model(
        module("encoder.0", "Block", "a", container="list"),
        module("decoder.0", "Block", "b", container="list"),
    )
    assert find_units(spec) == (("", ("a", "b")),)


def test_blocks_of_two_lists_are_units_in_model_order():
    spec = model(
        *(module(f"encoder.{i}", "Block", f"e{i}", container="list") for i in range(2)),
        *(module(f"decoder.{i}", "Cross", f"d{i}", container="list") for i in range(2)),
    )
    assert [path for path, _ in find_units(spec)] == ["", "encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_a_parameter_of_several_blocks_goes_to_the_root():
    spec = model(
        module("blocks.0", "Block", "a", "shared", container="list"),
        module("blocks.1", "Block", "b", "shared", container="list"),
    )
    assert find_units(spec) == (("", ("shared",)), ("blocks.0", ("a",)), ("blocks.1", ("b",)))


def test_a_parameter_that_one_block_lists_twice_is_its_own():
    spec = model(
        module("blocks.0", "Block", "a", "a", container="list"),
        module("blocks.1", "Block", "b", container="list"),
    )
    assert find_units(spec) == (("", ()), ("blocks.0", ("a",)), ("blocks.1", ("b",)))


def test_blocks_that_share_everything_are_no_units():
    spec = model(
        module("blocks.0", "Block", "shared", container="list"),
        module("blocks.1", "Block", "shared", container="list"),
    )
    assert find_units(spec) == (("", ("shared",)),)


def test_named_classes_become_units_wherever_they_are():
    spec = model(
        module("encoder", "Encoder", "a", "b"),
        module("encoder.norm", "Norm", "b", composite=False),
        module("blocks.0", "Block", "c", container="list"),
        module("blocks.1", "Block", "d", container="list"),
    )
    assert find_units(spec, ["Encoder"]) == (("", ("c", "d")), ("encoder", ("a", "b")))
    assert find_units(spec, ["Norm", "Block"]) == (
        ("", ("a",)),
        ("encoder.norm", ("b",)),
        ("blocks.0", ("c",)),
        ("blocks.1", ("d",)),
    )


def test_named_classes_inside_each_other_make_the_outer_one_a_unit():
    spec = model(module("encoder", "Encoder", "a", "b"), module("encoder.norm", "Norm", "b", composite=False))
    assert find_units(spec, ["Norm", "Encoder"]) == (("", ()), ("encoder", ("a", "b")))


def test_naming_the_class_of_the_model_itself_leaves_one_unit():
    spec = model(module("blocks.0", "Net", "a", container="list"), root=("b",))
    assert find_units(spec, ["Net"]) == (("", ("b",)), ("blocks.0", ("a",)))
    assert find_units(model(root=("a", "b")), ["Net"]) == (("", ("a", "b")),)


def sized(width: int, head: str = "Linear", container: str = "", tied: bool = False) -> ModelSpec:
    """Two blocks of 4 Mi elements, and an embedding and a head of ``width`` Mi elements each."""
    sizes = {"embed": width << 20, "a": 4 << 20, "b": 4 << 20, "head": width << 20, "norm": 8}
    modules = (
        module("wte", "Embedding", "embed", composite=False),
        module("blocks.0", "Block", "a", container="list"),
        module("blocks.0.wide", "Linear", "a", composite=False),
        module("blocks.1", "Block", "b", container="list"),
        module("lm_head", head, "embed" if tied else "head", container=container, composite=False),
    )
    if tied:
        del sizes["head"]
    specs = tuple(ParameterSpec(name=n, shape=(s,), dtype="float32", trainable=True) for n, s in sizes.items())
    aliases = (("lm_head.weight", "embed"),) if tied else ()
    return ModelSpec(class_name="Net", parameters=specs, modules=modules, aliases=aliases)


def test_tables_of_at_least_a_quarter_of_a_block_are_units_in_model_order():
    cut = (
        ("", ("norm",)),
        ("wte", ("embed",)),
        ("blocks.0", ("a",)),
        ("blocks.1", ("b",)),
        ("lm_head", ("head",)),
    )
    assert find_units(sized(9)) == find_units(sized(1)) == cut
    assert find_units(sized(0))[0] == ("", ("embed", "head", "norm"))
    assert find_units(sized(9), ["Block"])[0] == ("", ("embed", "head", "norm"))
    # What no forward of its own promises to use stays where it is always gathered.
    assert find_units(sized(9, "NonDynamicallyQuantizableLinear"))[0] == ("", ("head", "norm"))
    assert find_units(sized(9, container="list"))[0] == ("", ("head", "norm"))


def test_tied_tables_share_the_root():
    assert find_units(sized(9, tied=True))[0] == ("", ("embed", "norm"))


def test_an_empty_list_of_names_means_one_unit():
    spec = model(
        module("blocks.0", "Block", "a", container="list"),
        module("blocks.1", "Block", "b", container="list"),
    )
    assert find_units(spec, []) == (("", ("a", "b")),)


def test_a_class_the_model_lacks_is_refused_with_the_nearest_one():
    spec = model(module("blocks.0", "DecoderLayer", "a", container="list"))
    with pytest.raises(PlanError) as raised:
        find_units(spec, ["DecoderLayr"])
    text = str(raised.value)
    assert "'DecoderLayr'" in text and "Did you mean 'DecoderLayer'?" in text
    assert "shardledger.units" in text and "Net" in text and "DecoderLayer, Net" in text


def test_a_class_unlike_any_other_is_refused_without_a_guess():
    with pytest.raises(PlanError, match="'Zebra'") as raised:
        find_units(model(module("blocks.0", "Block", "a")), ["Zebra"])
    assert "Did you mean" not in str(raised.value)
    assert "Its classes: Block, Net." in str(raised.value)


def test_every_parameter_is_in_exactly_one_unit():
    spec = model(
        *(module(f"blocks.{i}", "Block", f"a{i}", f"b{i}", "tied", container="list") for i in range(5)),
        *(module(f"blocks.{i}.inner", "Linear", f"a{i}", composite=False) for i in range(5)),
        root=("embed", "tied"),
    )
    for chosen in (None, [], ["Linear"], ["Block"], ["Linear", "Block"]):
        found = [name for _, names in find_units(spec, chosen) for name in names]
        assert sorted(found) == sorted(p.name for p in spec.parameters)
