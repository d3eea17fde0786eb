"""B59: two sources of truth that disagree are an error that shows both."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardledger.config import load_config
from shardledger.errors import ConfigError


def test_two_precisions_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fp16\.enabled and bf16\.enabled are both true"):
        load_config({"fp16": {"enabled": True}, "bf16": {"enabled": True}})


@pytest.mark.parametrize(
    ("bf16", "param_dtype", "agrees"),
    [(True, "bf16", True), (True, "fp32", False), (False, "bf16", False), (False, "fp32", True), (True, "fp16", False)],
)
def test_param_dtype_must_agree_with_the_precision(bf16: bool, param_dtype: str, agrees: bool) -> None:
    keys = {"bf16": {"enabled": bf16}, "data_types": {"param_dtype": param_dtype}}
    if agrees:
        assert load_config(keys).data_types.param_dtype == param_dtype
        return
    with pytest.raises(ConfigError) as caught:
        load_config(keys)
    for piece in (f"data_types.param_dtype is {param_dtype}", f"bf16.enabled is {str(bf16).lower()}", "make the run"):
        assert piece in str(caught.value)


def test_a_precision_from_elsewhere_is_compared(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"bf16": {"enabled": true}}')
    config = load_config(file)
    config.conflicts_with(precision="bfloat16", source="--precision")
    with pytest.raises(ConfigError) as caught:
        config.conflicts_with(precision="fp16", source="--precision")
    for piece in (f"bf16 in {file}", "bf16.enabled is true", "fp16 in --precision"):
        assert piece in str(caught.value)


def test_a_precision_the_file_does_not_state_is_fp32() -> None:
    with pytest.raises(
        ConfigError, match="fp32 in the config dict .neither bf16 nor fp16 is on. but bf16 in --precision"
    ):
        load_config({}).conflicts_with(precision="bf16", source="--precision")


def test_a_precision_that_does_not_say_which_16_bits_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision from Trainer: '16-mixed' is not a dtype"):
        load_config({}).conflicts_with(precision="16-mixed", source="Trainer")


def test_a_loader_with_another_batch_is_refused_and_both_are_shown() -> None:
    config = load_config({"train_micro_batch_size_per_gpu": 2})
    config.conflicts_with(micro_batch=2, source="training_data")
    with pytest.raises(ConfigError, match="is 2 in the config dict but 4 in training_data"):
        config.conflicts_with(micro_batch=4, source="training_data")


def test_a_batch_derived_from_what_the_file_states_counts_as_stated() -> None:
    config = load_config({"train_batch_size": 8}, world=4)
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpu is 2 .* but 4"):
        config.conflicts_with(micro_batch=4)


def test_a_batch_the_file_does_not_state_contradicts_nothing() -> None:
    load_config({}).conflicts_with(micro_batch=4, gradient_accumulation_steps=3)
    load_config({"train_micro_batch_size_per_gpu": "auto"}).conflicts_with(micro_batch=4)


def test_accumulation_in_file_and_in_code_and_all_conflicts_at_once() -> None:
    config = load_config({"gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ConfigError) as caught:
        config.conflicts_with(micro_batch=3, gradient_accumulation_steps=4, precision="bf16", source="the script")
    assert len(caught.value.problems) == 3
    assert "gradient_accumulation_steps is 2 in the config dict but 4 in the script" in str(caught.value)


def test_the_effective_values_can_be_printed() -> None:
    lines = load_config({"train_batch_size": 32, "bf16": {"enabled": True}}, world=4).summary()
    for piece in ("source: the config dict", "precision: bf16", "zero stage: 0", "clipping: off"):
        assert any(piece in line for line in lines)
    assert "batch: 32 = micro 8 x accumulation 1 x ranks 4" in lines
