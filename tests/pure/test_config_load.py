"""Where a configuration may come from, how its values are read, and what comes out."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from shardledger.config import Config, load_config
from shardledger.errors import ConfigError

ZERO_2: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 16,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "gradient_clipping": 1.0,
}
ZERO_3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_clipping": 1.0,
}


def test_the_zero_2_example_loads_unchanged() -> None:
    config = load_config(ZERO_2, world=2)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (32, 16)
    assert (config.precision, config.zero_optimization.stage, config.gradient_clipping) == ("bf16", 2, 1.0)
    assert config.zero_optimization.overlap_comm is True
    assert {line.partition(":")[0] for line in config.no_effect} == {
        "zero_optimization.allgather_partitions",
        "zero_optimization.reduce_scatter",
        "zero_optimization.contiguous_gradients",
    }


def test_the_zero_3_example_loads_unchanged() -> None:
    zero = load_config(ZERO_3, world=2).zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.prefetch_bucket_size) == (3, 500_000_000, 50_000_000)
    assert (zero.param_persistence_threshold, zero.gather_16bit_weights_on_model_save) == (100_000, True)
    assert type(zero.reduce_bucket_size) is int


def test_an_empty_file_means_fp32_without_sharding_and_without_clipping() -> None:
    config = load_config({})
    assert (config.precision, config.zero_optimization.stage, config.gradient_clipping) == ("fp32", 0, 0.0)
    assert config.optimizer is None and config.scheduler is None
    assert any("gradient_clipping" in line and "DeepSpeed" in line for line in config.resolutions)


@pytest.mark.parametrize("example", [ZERO_2, ZERO_3, {}], ids=["zero2", "zero3", "empty"])
@pytest.mark.parametrize("world", [1, 7])
def test_what_is_written_out_loads_to_an_equal_configuration(example: dict[str, Any], world: int) -> None:
    config = load_config(example, world=world)
    again = load_config(json.dumps(config.to_dict()), world=world)
    assert again == config and hash(again) == hash(config)
    assert again.no_effect == config.no_effect
    assert load_config({**example, "gradient_clipping": 2}, world=world) != config


def test_the_written_form_uses_deepspeeds_names_and_keeps_keys_without_effect() -> None:
    written = load_config(ZERO_3).to_dict()["zero_optimization"]
    assert written["stage3_prefetch_bucket_size"] == 50_000_000
    assert written["contiguous_gradients"] is True


def test_a_configuration_is_frozen_and_travels_between_processes() -> None:
    config = load_config(ZERO_2)
    with pytest.raises(ValidationError):
        config.gradient_clipping = 3.0  # type: ignore[misc]
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config and copy.no_effect == config.no_effect


def test_dict_path_text_and_base64_are_the_same_configuration(tmp_path: Path) -> None:
    text = json.dumps(ZERO_2)
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    expected = load_config(ZERO_2)
    for source in (file, str(file), text, encoded, encoded.rstrip("=")):
        assert load_config(source) == expected


def test_comments_and_trailing_commas_are_tolerated_outside_text() -> None:
    config = load_config(
        """
        // the run
        {  # how much
          "train_batch_size": 8,  /* over
          all ranks */
          "optimizer": {"type": "my // Optimizer, }", "params": {},},
        }
        """
    )
    assert config.train_batch_size == 8
    assert config.optimizer is not None and config.optimizer.type == "my // Optimizer, }"


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(b"\xef\xbb\xbf{}")
    assert isinstance(load_config(file), Config)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ('{"bf16": {"enabled": true}, "bf16": {}}', ["bf16 is written more than once"]),
        ('{"a": {"b": 1, "b": 1}, "c": [{"d": 1, "d": 2}]}', ["a.b is written", "c[0].d is written"]),
        ('{\n "steps_per_print": True}', ["line 2, column 21", "lower case"]),
        ("{'a': 1}", ["line 1, column 2", "double quotes"]),
        ("# nothing\n", ["empty"]),
        ("// a list\n[1]", ["one JSON object", "list"]),
    ],
)
def test_a_defect_of_form_is_named_with_its_place(text: str, pieces: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(text)
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    for text, words in (
        ("", "is empty"),
        ("  ", "is empty"),
        ("[1]", "not list"),
        ("null", "not NoneType"),
        ("3", "not int"),
    ):
        with pytest.raises(ConfigError, match=f"config text .*{words}"):
            load_config(text, world=1)
    with pytest.raises(ConfigError, match="no file 'nowhere.json'"):
        load_config("nowhere.json")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match="not int"):
        load_config(3)  # type: ignore[arg-type]


def test_problems_of_a_file_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"gradient_clipping": -1, "foo": 2}')
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert len(caught.value.problems) == 2
    assert all(problem.startswith(f"{file}: ") for problem in caught.value.problems)


@pytest.mark.parametrize("value", [500000000, 5e8, "500000000", "5e8"])
def test_whole_numbers_may_be_written_as_floats_and_text(value: object) -> None:
    assert load_config({"zero_optimization": {"reduce_bucket_size": value}}).zero_optimization.reduce_bucket_size == 5e8


@pytest.mark.parametrize("value", [1.5, "1.5", True, False, "many", [1], {}, float("inf"), -1])
def test_what_is_no_whole_number_is_refused_with_path_value_and_meaning(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"reduce_bucket_size": value}})
    (problem,) = caught.value.problems
    assert problem.startswith("zero_optimization.reduce_bucket_size = ")
    assert "elements reduced in one collective" in problem


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("False", False), (1, True)])
def test_text_for_a_boolean_means_what_it_says(value: object, expected: bool) -> None:
    assert load_config({"wall_clock_breakdown": value}).wall_clock_breakdown is expected


@pytest.mark.parametrize("value", ["maybe", 2, [], None])
def test_what_is_no_boolean_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="bf16.enabled = "):
        load_config({"bf16": {"enabled": value}})


@pytest.mark.parametrize("value", ["nan", float("nan"), float("inf"), True, "x", -0.1])
def test_what_is_no_finite_positive_number_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="gradient_clipping = "):
        load_config({"gradient_clipping": value})


def test_null_means_not_given_where_a_key_may_be_left_open() -> None:
    config = load_config({"optimizer": None, "bf16": None, "train_batch_size": None, "steps_per_print": None})
    assert config == load_config({})


def test_infinity_for_steps_per_print_means_never() -> None:
    assert load_config({"steps_per_print": float("inf")}).steps_per_print is None
    assert load_config({"steps_per_print": 10}).steps_per_print == 10


def test_both_spellings_of_a_stage_3_key_work_but_not_at_once() -> None:
    plain = load_config({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 7}})
    assert plain == load_config({"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7}})
    with pytest.raises(ConfigError, match="two names of one key"):
        load_config({"zero_optimization": {"prefetch_bucket_size": 7, "stage3_prefetch_bucket_size": 7}})


def test_a_wrong_value_is_reported_under_the_name_the_file_used() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage3_prefetch_bucket_size = 1\.5"):
        load_config({"zero_optimization": {"stage3_prefetch_bucket_size": 1.5}})


def test_outdated_spellings_are_forwarded_with_a_warning() -> None:
    config = load_config({"zero_optimization": True, "bfloat16": {"enabled": True}})
    assert (config.zero_optimization.stage, config.precision) == (1, "bf16")
    assert 'write {"stage": 1}' in config.warnings[0]
    config = load_config({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}})
    assert config.zero_optimization.gather_16bit_weights_on_model_save is True
    assert "gather_16bit_weights_on_model_save" in config.warnings[0]
    assert load_config({"zero_optimization": {"cpu_offload": False}}).zero_optimization.offload_optimizer is None
    moved = load_config({"zero_optimization": {"stage": 2, "cpu_offload": True}}).zero_optimization.offload_optimizer
    assert moved is not None and moved.device == "cpu"
    with pytest.raises(ConfigError, match=r"zero_optimization\.cpu_offload_param needs stage 3, and the stage is 2"):
        load_config({"zero_optimization": {"stage": 2, "cpu_offload_param": True}})
    with pytest.raises(ConfigError, match="two names of one key"):
        load_config({"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}})


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_dtypes_have_several_spellings(spelling: str) -> None:
    config = load_config({"communication_data_type": spelling, "data_types": {"grad_accum_dtype": spelling}})
    assert (config.communication_data_type, config.data_types.grad_accum_dtype) == ("bf16", "bf16")


def test_our_own_section_has_its_defaults_in_one_place() -> None:
    own = load_config({}).shardledger
    assert (own.units, own.activation_checkpointing, own.timeout_s, own.prefetch) == (None, False, 600.0, True)
    own = load_config({"shardledger": {"units": ["Block"], "timeout_s": 5}}).shardledger
    assert (own.units, own.timeout_s) == (("Block",), 5.0)


def test_reading_a_configuration_needs_no_torch() -> None:
    program = "import sys, shardledger.config as c; c.load_config({}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0


@pytest.mark.parametrize("written", ["22GiB", "22GB", 22_000_000_000, "600KiB"])
def test_memory_sizes_are_read_and_written_out_so_that_they_load_again(written):
    config = load_config({"shardledger": {"device_memory": written}})
    assert load_config(config.to_dict()) == config
    assert config.to_dict()["shardledger"]["device_memory"] == f"{config.shardledger.device_memory}B"


def test_a_memory_size_with_a_forgotten_unit_is_refused():
    with pytest.raises(ConfigError, match="shardledger.device_memory = 22.*did you mean 22GiB"):
        load_config({"shardledger": {"device_memory": 22}})


OPEN = {"zero_optimization": {"stage": "auto"}, "shardledger": {"memory_budget": "22GiB"}}


def test_an_open_stage_stays_open_until_it_is_decided():
    config = load_config(OPEN)
    assert config.stage_is_open
    assert config.shardledger.memory_budget == 22 * 2**30
    assert config.to_dict()["zero_optimization"]["stage"] == "auto"
    assert load_config(config.to_dict()) == config
    decided = config.decided(stage=2, activation_checkpointing=True)
    assert not decided.stage_is_open
    assert decided.zero_optimization.stage == 2 and decided.shardledger.activation_checkpointing
    again = load_config(decided.to_dict())
    assert again == decided and not again.stage_is_open
    assert any("chosen by the memory budget" in line for line in decided.resolutions)


def test_an_open_stage_needs_a_budget_and_a_budget_an_open_stage():
    with pytest.raises(ConfigError, match='zero_optimization.stage is "auto", and there is no budget'):
        load_config({"zero_optimization": {"stage": "auto"}})
    closed = load_config({"zero_optimization": {"stage": 2}, "shardledger": {"memory_budget": "22GiB"}})
    assert any(line.startswith("shardledger.memory_budget: it is read when") for line in closed.no_effect)


@pytest.mark.parametrize(
    ("stage", "own", "lesson"),
    [
        (2, {"unit_stages": {"blocks.0": 3}}, "'blocks.0' has a higher stage than zero_optimization.stage = 2"),
        (2, {"unit_stages": {"blocks.0": 4}}, "shardledger.unit_stages"),
        (3, {"unit_stages": ["blocks.0"]}, "shardledger.unit_stages"),
        (3, {"recomputed_units": ["blocks.0"]}, "activation_checkpointing is false"),
        ("auto", {"unit_stages": {"blocks.0": 1}, "memory_budget": "1GiB"}, "are what the budget chooses"),
    ],
)
def test_choices_for_units_that_contradict_the_rest_are_refused(stage, own, lesson):
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": stage}, "shardledger": own})
    assert lesson in str(caught.value)


def test_choices_for_units_survive_writing_and_reading():
    own = {"unit_stages": {"(root)": 2}, "activation_checkpointing": True, "recomputed_units": ["blocks.0"]}
    config = load_config({"zero_optimization": {"stage": 3}, "shardledger": own})
    assert load_config(config.to_dict()) == config
    decided = load_config(OPEN).decided(
        stage=3, activation_checkpointing=True, unit_stages={"(root)": 2}, recomputed_units=["blocks.0"]
    )
    assert decided.shardledger.unit_stages == {"(root)": 2} and decided.shardledger.recomputed_units == ("blocks.0",)
