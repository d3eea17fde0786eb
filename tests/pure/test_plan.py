"""From the configuration and the model to the plan: each knob is read once, and all ranks decide alike."""

from dataclasses import replace

import pytest

from shardledger.config import load_config
from shardledger.errors import PlanError
from shardledger.plan.build import ALIGNMENT, build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.roles import STAGE_ROLES, Role
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec

SIZES = {"embed": 1000, "blocks.0.w": 400, "blocks.0.b": 20, "blocks.1.w": 400, "blocks.1.b": 20, "head": 300}


def model_of(sizes=None, *, dtype="float32", frozen=()) -> ModelSpec:
    """Two repeated blocks and what is around them; ``sizes`` are elements by name."""
    sizes = SIZES if sizes is None else sizes
    parameters = tuple(
        ParameterSpec(name=name, shape=(numel,), dtype=dtype, trainable=name not in frozen)
        for name, numel in sizes.items()
    )
    blocks = tuple(
        ModuleSpec(
            path=f"blocks.{i}",
            class_name="Block",
            container="list",
            composite=True,
            parameters=tuple(name for name in sizes if name.startswith(f"blocks.{i}.")),
        )
        for i in range(2)
    )
    return ModelSpec(class_name="Net", parameters=parameters, modules=blocks)


def plan_of(stage=0, world=2, model=None, precision="fp32", zero=None, **more) -> Plan:
    config = {
        "zero_optimization": {"stage": stage, **(zero or {})},
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }
    return build_plan(load_config(config, world=world), model or model_of(), world=world)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_the_set_of_roles_that_are_sharded(stage):
    plan = plan_of(stage)
    assert (plan.stage, plan.world, plan.alignment) == (stage, 2, ALIGNMENT)
    assert [plan.is_sharded(role) for role in (Role.OPTIM, Role.GRAD, Role.PARAM)] == [
        stage >= 1,
        stage >= 2,
        stage >= 3,
    ]
    assert all(unit.sharded == plan.units[0].sharded for unit in plan.units)


@pytest.mark.parametrize(
    ("precision", "stage", "accumulation", "more", "expected"),
    [
        # (compute, accumulate, local_accumulate, wire)
        ("fp32", 0, 1, {}, ("float32", "float32", "float32", "float32")),
        ("fp32", 1, 4, {}, ("float32", "float32", "float32", "float32")),
        ("fp32", 3, 1, {}, ("float32", "float32", "float32", "float32")),
        ("bf16", 0, 1, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 0, 4, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 1, 1, {}, ("bfloat16", "float32", "bfloat16", "bfloat16")),
        ("bf16", 1, 4, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 2, 1, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 2, 4, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 3, 4, {}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 1, 4, {"data_types": {"grad_accum_dtype": "bf16"}}, ("bfloat16", "bfloat16", "bfloat16", "bfloat16")),
        ("bf16", 1, 1, {"data_types": {"grad_accum_dtype": "fp32"}}, ("bfloat16", "float32", "float32", "bfloat16")),
        ("bf16", 3, 1, {"communication_data_type": "fp32"}, ("bfloat16", "float32", "float32", "float32")),
        ("fp32", 2, 1, {"communication_data_type": "bf16"}, ("float32", "float32", "float32", "bfloat16")),
    ],
)
def test_dtypes_of_sums(precision, stage, accumulation, more, expected):
    found = plan_of(stage, precision=precision, gradient_accumulation_steps=accumulation, **more).precision
    assert (found.compute, found.accumulate, found.local_accumulate, found.wire) == expected


@pytest.mark.parametrize(
    ("zero", "kept"),
    [
        ({"stage3_param_persistence_threshold": 0}, set()),
        ({}, set()),
        ({"stage3_param_persistence_threshold": 19}, set()),
        ({"stage3_param_persistence_threshold": 20}, {"blocks.0.b", "blocks.1.b"}),
        ({"stage3_param_persistence_threshold": 300}, {"blocks.0.b", "blocks.1.b", "head"}),
        ({"stage3_param_persistence_threshold": 10**6}, set(SIZES)),
        (
            {"stage3_param_persistence_threshold": 300, "stage3_model_persistence_threshold": 40},
            {"blocks.0.b", "blocks.1.b"},
        ),
        ({"stage3_param_persistence_threshold": 300, "stage3_model_persistence_threshold": 39}, {"blocks.0.b"}),
        ({"stage3_param_persistence_threshold": 300, "stage3_model_persistence_threshold": 0}, set()),
        # Too big for what is left, the smaller one behind it is not.
        ({"stage3_param_persistence_threshold": 400, "stage3_model_persistence_threshold": 399}, {
            "blocks.0.b", "blocks.1.b", "head"}),
    ],
)  # fmt: skip
def test_small_parameters_stay_gathered_within_both_thresholds(zero, kept):
    assert plan_of(3, zero=zero).persistent == kept


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_threshold_lays_parameters_out_alike_at_every_stage_but_only_stage_3_speaks_of_it(stage):
    zero = {"stage3_param_persistence_threshold": 300}
    plan = plan_of(stage, zero=zero)
    assert plan.persistent == plan_of(3, zero=zero).persistent != frozenset()
    assert not any("keeps" in line for line in plan.reasons)


def test_the_plan_tells_how_much_persistence_costs():
    plan = plan_of(3, zero={"stage3_param_persistence_threshold": 300})
    assert any("keeps 3 of 6 parameters gathered (16% of the elements)" in line for line in plan.reasons)


@pytest.mark.parametrize(
    ("asked", "numel"), [(None, 1300), (10**9, 1300), (1300, 1300), (1299, 1299), (64, 64), (0, 1)]
)
def test_a_reduction_never_has_more_in_flight_than_asked_or_than_the_largest_unit(asked, numel):
    zero = {} if asked is None else {"reduce_bucket_size": asked}
    assert plan_of(2, zero=zero).communication.reduce_bucket_numel == numel


@pytest.mark.parametrize("zero", [{}, {"stage3_param_persistence_threshold": 5}])
def test_a_model_without_elements_still_has_a_plan(zero):
    plan = plan_of(3, model=model_of({"w": 0, "v": 0}), zero=zero)
    assert plan.communication.reduce_bucket_numel == 1


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({}, "overlap", True),
        ({"zero_optimization": {"overlap_comm": False}}, "overlap", False),
        ({}, "prefetch", True),
        ({"shardledger": {"prefetch": False}}, "prefetch", False),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": 0}}, "prefetch", False),
        ({"zero_optimization": {"stage3_prefetch_bucket_size": 5}}, "prefetch", True),
        ({}, "max_live_numel", 2140),
        ({"zero_optimization": {"stage3_max_live_parameters": 17}}, "max_live_numel", 17),
        ({}, "average", True),
        ({"gradient_allreduce_op": "sum"}, "average", False),
        ({"shardledger": {"timeout_s": 7.5}}, "timeout_s", 7.5),
    ],
)
def test_knobs_of_communication(settings, field, value):
    config = {**settings, "zero_optimization": {"stage": 3, **settings.get("zero_optimization", {})}}
    plan = build_plan(load_config(config, world=2), model_of(), world=2)
    assert getattr(plan.communication, field) == value


def test_the_step_rule_is_the_resolved_batch_triple_and_the_clipping_norm():
    plan = plan_of(1, world=2, train_batch_size=24, gradient_accumulation_steps=3, gradient_clipping=0.5)
    assert (plan.step.micro_batch, plan.step.accumulation, plan.step.clip_norm) == (4, 3, 0.5)
    assert plan_of(1).step.clip_norm == 0.0


def test_recomputation_concerns_blocks_and_never_the_root():
    plan = plan_of(3, shardledger={"activation_checkpointing": True})
    assert [(unit.label, unit.recompute) for unit in plan.units] == [
        ("(root)", False),
        ("blocks.0", True),
        ("blocks.1", True),
    ]
    assert not any(unit.recompute for unit in plan_of(3).units)


def test_units_named_in_the_configuration_are_taken():
    assert [unit.path for unit in plan_of(3, shardledger={"units": []}).units] == [""]
    with pytest.raises(PlanError, match="Did you mean 'Block'"):
        plan_of(3, shardledger={"units": ["Blok"]})


def test_a_model_without_parameters_is_refused_by_name():
    with pytest.raises(PlanError, match="Net has no parameters"):
        plan_of(0, model=model_of({}))


def test_reasons_say_how_the_model_was_split_and_which_dtypes_were_replaced():
    assert any("2,140 parameters in 2 repeated block(s) and the root unit" in line for line in plan_of(3).reasons)
    alone = plan_of(3, model=model_of({"w": 5, "v": 6}))
    assert any("11 parameters in one unit" in line and "shardledger.units" in line for line in alone.reasons)
    mixed = plan_of(3, model=model_of(dtype="float16"), precision="bf16")
    assert any("float16 are trained in bf16" in line for line in mixed.reasons)
    assert not any("are trained in" in line for line in plan_of(3, precision="fp32").reasons)


def test_the_fingerprint_is_the_same_whenever_the_decisions_are():
    plan, again = plan_of(3), plan_of(3)
    assert plan is not again and plan == again and plan.fingerprint == again.fingerprint
    assert len(plan.fingerprint) == 64 and int(plan.fingerprint, 16) >= 0
    assert replace(plan, reasons=("other words",)).fingerprint == plan.fingerprint
    assert plan_of(3, steps_per_print=5).fingerprint == plan_of(3).fingerprint
    # Another way to say the same: the cap lies above the largest unit.
    assert plan_of(3, zero={"reduce_bucket_size": 10**8}).fingerprint == plan_of(3).fingerprint


DIFFERENT = {
    "stage": {"stage": 2},
    "world": {"world": 4},
    "precision": {"precision": "bf16"},
    "bucket": {"zero": {"reduce_bucket_size": 64}},
    "prefetch": {"shardledger": {"prefetch": False}},
    "overlap": {"zero": {"overlap_comm": False}},
    "units": {"shardledger": {"units": []}},
    "recompute": {"shardledger": {"activation_checkpointing": True}},
    "one recomputed": {"shardledger": {"activation_checkpointing": True, "recomputed_units": ["blocks.1"]}},
    "one whole": {"shardledger": {"unit_stages": {"blocks.1": 2}}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "micro batch": {"train_micro_batch_size_per_gpu": 2},
    "clipping": {"gradient_clipping": 1.0},
    "sum": {"gradient_allreduce_op": "sum"},
    "wire": {"communication_data_type": "bf16"},
    "a name": {"model": model_of({**{k: v for k, v in SIZES.items() if k != "head"}, "tail": 300})},
    "an order": {"model": model_of(dict(reversed(SIZES.items())))},
}


def test_the_fingerprint_differs_whenever_a_decision_does():
    prints = {what: plan_of(**{"stage": 3, **arguments}).fingerprint for what, arguments in DIFFERENT.items()}
    prints["plain"] = plan_of(3).fingerprint
    assert len(set(prints.values())) == len(prints)


def test_what_differs_between_two_plans_can_be_named():
    one, other = plan_of(3).fingerprints, plan_of(3, gradient_clipping=0.5).fingerprints
    assert [name for name in one if one[name] != other[name]] == ["step"]


def test_the_fingerprint_covers_which_parameters_stay_gathered():
    prints = [
        plan_of(3, zero={"stage3_param_persistence_threshold": numel}).fingerprint for numel in (0, 20, 300, 10**6)
    ]
    assert len(set(prints)) == 4


@pytest.mark.parametrize(
    "other",
    [
        model_of({**SIZES, "blocks.0.w": 401, "blocks.1.w": 399}),
        model_of(frozen=("blocks.0.w",)),
        model_of(dtype="float64"),
    ],
    ids=["shape", "requires_grad", "dtype"],
)
def test_the_fingerprint_tells_models_apart_that_are_laid_out_differently(other):
    assert plan_of(3, model=other).fingerprint != plan_of(3).fingerprint


def test_units_may_shard_less_than_the_stage_says_and_be_recomputed_by_name():
    own = {
        "unit_stages": {"(root)": 2, "blocks.1": 1},
        "activation_checkpointing": True,
        "recomputed_units": ["blocks.0"],
    }
    plan = plan_of(3, shardledger=own)
    assert [unit.sharded for unit in plan.units] == [STAGE_ROLES[2], STAGE_ROLES[3], STAGE_ROLES[1]]
    assert [unit.recompute for unit in plan.units] == [False, True, False]


@pytest.mark.parametrize(
    "own",
    [
        {"unit_stages": {"block.1": 2}},
        {"activation_checkpointing": True, "recomputed_units": ["block.1"]},
    ],
)
def test_a_unit_that_is_not_there_is_a_lesson(own):
    with pytest.raises(PlanError, match=r"names the unit 'block.1'.*Did you mean 'blocks.1'\? Its units: .*blocks.0"):
        plan_of(3, shardledger=own)
