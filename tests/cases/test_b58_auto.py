"""B58: "auto" is never compared with a number: it is resolved and told, left to the plan, or a named error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardledger.config import Config, load_config
from shardledger.config.findings import join
from shardledger.config.known_keys import RULES
from shardledger.config.section import Section, section_of
from shardledger.errors import ConfigError


def _paths(model: type[Section], path: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        child = section_of(field)
        yield join(path, name)
        if child is not None:
            yield from _paths(child, join(path, name))
    yield from (join(path, key) for key in RULES.get(path, {}))


def _nested(path: str, value: Any) -> dict[str, Any]:
    head, _, tail = path.partition(".")
    return {head: _nested(tail, value) if tail else value}


def _holds_auto(value: Any) -> bool:
    if isinstance(value, dict):
        return any(_holds_auto(item) for item in value.values())
    return bool(value == "auto")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("path", sorted(set(_paths(Config, ""))))
def test_every_key_takes_auto_or_says_why_not(path: str, stage: int) -> None:
    keys = _nested(path, "auto")
    if path != "zero_optimization.stage" and path != "zero_optimization":
        keys["zero_optimization"] = {"stage": stage, **keys.get("zero_optimization", {})}
    for section in ("optimizer", "scheduler"):
        if path.startswith(f"{section}."):
            keys[section] = {"type": "Adagrad" if section == "optimizer" else "WarmupLR", **keys[section]}
    try:
        config = load_config(keys, world=2)
    except ConfigError as error:
        assert any(problem.startswith(path) for problem in error.problems), error
        return
    told = (*config.resolutions, *config.no_effect)
    assert any(line.startswith(path) for line in told), told
    assert not _holds_auto(Section.to_dict(config))


def test_sizes_that_depend_on_the_model_are_left_to_the_plan() -> None:
    keys = {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "overlap_comm": "auto",
    }
    config = load_config({"zero_optimization": {"stage": 3, **keys}})
    zero = config.zero_optimization
    assert (zero.reduce_bucket_size, zero.prefetch_bucket_size) == (None, None)
    assert (zero.param_persistence_threshold, zero.overlap_comm) == (None, None)
    for key in keys:
        assert any(line.startswith(f"zero_optimization.{key}: auto, left to the plan") for line in config.resolutions)


def test_an_automatic_batch_is_derived_like_one_that_is_not_given() -> None:
    sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    config = load_config(sizes, world=3)
    assert (config.train_batch_size, config.gradient_accumulation_steps) == (6, 1)
    assert any(line.startswith("train_batch_size = 6") for line in config.resolutions)


def test_precision_and_clipping_fall_to_their_defaults_in_words() -> None:
    config = load_config({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "gradient_clipping": "auto"})
    assert (config.precision, config.gradient_clipping) == ("fp32", 0.0)
    assert any(line.startswith("bf16.enabled = false (auto") for line in config.resolutions)
    assert any(line.startswith("gradient_clipping = 0.0 (auto") for line in config.resolutions)


def test_warmup_max_lr_takes_the_optimizers_learning_rate() -> None:
    scheduler = {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 5},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 3e-4, "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    config = load_config({"optimizer": optimizer, "scheduler": scheduler})
    assert config.scheduler is not None and config.optimizer is not None
    assert config.scheduler.params == {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-4, "warmup_num_steps": 5}
    assert config.optimizer.params == {"lr": 3e-4}
    assert "scheduler.params.warmup_max_lr = 0.0003 (auto: optimizer.params.lr)" in config.resolutions


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_without_an_optimizer_section_it_is_the_rate_of_each_group(kind: str) -> None:
    params: dict[str, Any] = {"warmup_max_lr": "auto"}
    if kind == "WarmupDecayLR":
        params["total_num_steps"] = 5000
    config = load_config({"scheduler": {"type": kind, "params": params}})
    assert config.scheduler is not None and config.scheduler.resolved()[1]["warmup_max_lr"] is None
    assert load_config(config.to_dict()) == config


@pytest.mark.parametrize(
    "keys",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
        {"optimizer": {"type": "SomethingNew", "params": {"size": "auto"}}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}},
        {"scheduler": {"type": "StepLR", "params": {"step_size": "auto"}}},
    ],
)
def test_what_only_a_trainer_could_fill_is_a_named_error(keys: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r'params\.\w+ is "auto", and no trainer fills it here; write a value'
    ) as caught:
        load_config(keys)
    assert len(caught.value.problems) == 1
