"""The layout of a whole model: who shares a flat, and that no parameter is lost or held twice."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardledger.config import load_config
from shardledger.errors import LayoutError
from shardledger.layout.build import Layout, build_layout
from shardledger.plan.build import build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec


def parameter(name, shape=(8,), dtype="float32", trainable=True) -> ParameterSpec:
    return ParameterSpec(name=name, shape=tuple(shape), dtype=dtype, trainable=trainable)


def model_of(*parameters: ParameterSpec, blocks: int = 0) -> ModelSpec:
    """Parameters named ``blocks.<i>.…`` belong to block i of a ModuleList; the others to the root."""
    modules = [
        ModuleSpec(
            path=f"blocks.{i}",
            class_name="Block",
            container="list",
            composite=True,
            parameters=tuple(p.name for p in parameters if p.name.startswith(f"blocks.{i}.")),
        )
        for i in range(blocks)
    ]
    return ModelSpec(class_name="Net", parameters=parameters, modules=tuple(modules))


def layout_of(model: ModelSpec, world: int = 2, stage: int = 3, bf16: bool = False, **zero) -> tuple[Plan, Layout]:
    config = {"zero_optimization": {"stage": stage, **zero}, "bf16": {"enabled": bf16}}
    plan = build_plan(load_config(config, world=world), model, world=world)
    return plan, build_layout(plan, model)


def names(layout: Layout) -> list[tuple[int, list[str]]]:
    return [(flat.unit, [slot.name for slot in flat.slots]) for flat in layout.flats]


SPECS = st.lists(
    st.tuples(
        st.sampled_from(["", "blocks.0.", "blocks.1.", "blocks.2."]),
        st.lists(st.integers(0, 6), max_size=3),
        st.sampled_from(["float32", "bfloat16", "float64", "uint8", "int64"]),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(specs=SPECS, world=st.integers(1, 64), stage=st.integers(0, 3), threshold=st.integers(0, 40))
def test_every_parameter_is_in_one_flat_of_its_unit_with_its_own_kind(specs, world, stage, threshold):
    parameters = [
        parameter(f"{prefix}p{i}", shape, dtype, trainable and dtype not in ("uint8", "int64"))
        for i, (prefix, shape, dtype, trainable) in enumerate(specs)
    ]
    model = model_of(*parameters, blocks=3)
    assume(model.numel > 0)
    plan, layout = layout_of(model, world, stage, stage3_param_persistence_threshold=threshold)
    placed = [slot.name for flat in layout.flats for slot in flat.slots]
    assert sorted(placed) == sorted(p.name for p in parameters)
    for spec in parameters:
        flat = layout.flat_of(spec.name)
        assert spec.name in plan.units[flat.unit].parameters
        assert flat.trainable == spec.trainable
        assert flat.dtype == ("float32" if spec.dtype == "bfloat16" else spec.dtype)
        assert flat.param_sharded == (stage == 3 and spec.name not in plan.persistent)
        assert (flat.grad_sharded, flat.optim_sharded) == (stage >= 2, stage >= 1)
        held = [layout.pieces(spec.name, rank) for rank in range(world)]
        assert sum(piece.in_parameter.numel for pieces in held for piece in pieces) == spec.numel
        assert all(len(pieces) <= 1 for pieces in held)


def test_units_come_root_first_and_keep_registration_order():
    model = model_of(parameter("embed"), parameter("blocks.0.w"), parameter("blocks.0.b"), parameter("blocks.1.w"),
                     parameter("blocks.1.b"), parameter("head"), blocks=2)  # fmt: skip
    _, layout = layout_of(model)
    assert names(layout) == [
        (0, ["embed", "head"]),
        (1, ["blocks.0.w", "blocks.0.b"]),
        (2, ["blocks.1.w", "blocks.1.b"]),
    ]
    assert [len(list(layout.of_unit(unit))) for unit in range(3)] == [1, 1, 1]
    assert [slot.name for flat in layout.of_unit(2) for slot in flat.slots] == ["blocks.1.w", "blocks.1.b"]


def test_frozen_persistent_and_other_dtypes_get_flats_of_their_own():
    model = model_of(
        parameter("w", (100,)),
        parameter("small", (3,)),
        parameter("frozen", (50,), trainable=False),
        parameter("codes", (60,), "uint8", trainable=False),
        parameter("wide", (70,), "float64"),
        parameter("w2", (101,)),
    )
    _, layout = layout_of(model, stage3_param_persistence_threshold=10)
    assert names(layout) == [(0, ["w", "w2"]), (0, ["small"]), (0, ["frozen"]), (0, ["codes"]), (0, ["wide"])]
    assert [(flat.dtype, flat.trainable, flat.param_sharded) for flat in layout.flats] == [
        ("float32", True, True),
        ("float32", True, False),
        ("float32", False, True),
        ("uint8", False, True),
        ("float64", True, True),
    ]


def test_the_configured_precision_replaces_real_floats_only():
    kinds = ("float32", "bfloat16", "float16", "float64", "int64", "uint8", "complex64")
    model = model_of(*(parameter(kind, dtype=kind, trainable=False) for kind in kinds))
    for bf16, compute in ((True, "bfloat16"), (False, "float32")):
        _, layout = layout_of(model, bf16=bf16)
        assert {kind: layout.flat_of(kind).dtype for kind in kinds} == {
            **dict.fromkeys(kinds[:3], compute),
            **{kind: kind for kind in kinds[3:]},
        }


def test_an_unknown_parameter_is_refused_by_name():
    _, layout = layout_of(model_of(parameter("w")))
    with pytest.raises(LayoutError, match="no parameter 'v' in this layout"):
        layout.flat_of("v")
    with pytest.raises(LayoutError, match="no parameter 'v' in this layout"):
        layout.pieces("v", 0)


def test_a_unit_without_parameters_of_its_own_has_no_flats():
    model = model_of(parameter("blocks.0.w"), parameter("blocks.1.w"), blocks=2)
    plan, layout = layout_of(model)
    assert [unit.path for unit in plan.units] == ["", "blocks.0", "blocks.1"]
    assert list(layout.of_unit(0)) == []
