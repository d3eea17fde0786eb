"""The optimizer and scheduler sections: names, arguments, and what the runtime is told to build."""

from __future__ import annotations

from typing import Any

import pytest

from shardledger.config import load_config
from shardledger.errors import ConfigError


def resolved(kind: str, **params: Any) -> tuple[str, dict[str, Any]]:
    section = load_config({"optimizer": {"type": kind, "params": params}}).optimizer
    assert section is not None
    return section.resolved()


@pytest.mark.parametrize("kind", ["Adam", "adam", "ADAM", "AdamW", "adamw"])
def test_adam_is_adamw_with_deepspeeds_weight_decay(kind: str) -> None:
    assert resolved(kind, lr=0.01) == ("AdamW", {"lr": 0.01, "weight_decay": 0.0})


def test_adam_with_coupled_decay_can_be_asked_for() -> None:
    assert resolved("Adam", adam_w_mode=False, weight_decay=0.1) == ("Adam", {"weight_decay": 0.1})
    assert resolved("AdamW", adam_w_mode=False)[0] == "AdamW"


def test_torch_adam_keeps_torchs_own_weight_decay() -> None:
    assert resolved("Adam", torch_adam=True) == ("AdamW", {})


def test_the_chosen_weight_decay_is_told() -> None:
    lines = load_config({"optimizer": {"type": "AdamW"}}).resolutions
    assert any(line.startswith("optimizer.params.weight_decay = 0.0") and "0.01" in line for line in lines)
    lines = load_config({"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}}}).resolutions
    assert not any("weight_decay" in line for line in lines)


def test_arguments_are_converted_to_what_torch_takes() -> None:
    kind, arguments = resolved("AdamW", lr="3e-4", betas=[0.9, "0.95"], eps=1e-8, fused="true", weight_decay=0)
    assert kind == "AdamW"
    assert arguments == {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "fused": True, "weight_decay": 0.0}


def test_sgd_and_deepspeeds_adagrad() -> None:
    assert resolved("SGD", lr=1, momentum=0.9) == ("SGD", {"lr": 1.0, "momentum": 0.9})
    assert resolved("adagrad", lr=1) == ("Adagrad", {"lr": 1.0})


def test_an_unlisted_class_is_left_to_the_runtime() -> None:
    assert resolved("SomethingNew", whatever=[1, 2]) == ("SomethingNew", {"whatever": (1, 2)})


@pytest.mark.parametrize(
    "kind", ["Lamb", "lion", "Muon", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "LBFGS", "Adafactor", "SparseAdam"]
)
def test_optimizers_that_cannot_run_on_pieces_are_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f'optimizer.type = "{kind}".*use AdamW'):
        load_config({"optimizer": {"type": kind, "params": {"lr": "auto", "odd": 1}}})


def test_a_class_name_in_the_wrong_case_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match='did you mean "SGD"'):
        load_config({"optimizer": {"type": "sgd"}})
    with pytest.raises(ConfigError, match='did you mean "WarmupLR"'):
        load_config({"scheduler": {"type": "warmuplr"}})


@pytest.mark.parametrize(
    ("params", "pieces"),
    [
        ({"max_grad_norm": 1.0}, ["optimizer.params.max_grad_norm", "gradient_clipping at the top level"]),
        ({"gradient_clipping": 1.0}, ["optimizer.params.gradient_clipping", "belongs at the top level"]),
        ({"weight_deccay": 1.0}, ["did you mean optimizer.params.weight_decay"]),
        ({"momentum": 0.9}, ["optimizer.params.momentum", "not an argument of the chosen type", "betas"]),
        ({"lr": -1}, ["optimizer.params.lr = -1"]),
        ({"lr": True}, ["optimizer.params.lr = true"]),
        ({"betas": [0.9, 1.0]}, ["optimizer.params.betas[1] = 1.0"]),
        ({"betas": 0.9}, ["optimizer.params.betas = 0.9"]),
        ({"bias_correction": False}, ["bias_correction = false", "always"]),
    ],
)
def test_a_wrong_argument_is_answered_with_the_cure(params: dict[str, Any], pieces: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"optimizer": {"type": "AdamW", "params": params}})
    assert all(piece in str(caught.value) for piece in pieces), str(caught.value)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_a_section_without_type_says_so(section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.type is missing"):
        load_config({section: {"params": {"lr": 1}}})


def schedule(kind: str, **params: Any) -> tuple[str, dict[str, Any]]:
    section = load_config({"scheduler": {"type": kind, "params": params}}).scheduler
    assert section is not None
    return section.resolved()


def test_warmup_schedules_get_deepspeeds_defaults() -> None:
    common = {"warmup_num_steps": 1000, "warmup_type": "log", "last_batch_iteration": -1}
    assert schedule("WarmupLR") == ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": None, **common})
    assert schedule("WarmupDecayLR", total_num_steps="2e3")[1] == {
        "total_num_steps": 2000,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        **common,
    }
    assert schedule("WarmupCosineLR", total_num_steps=5000, warmup_type="linear")[1] == {
        "total_num_steps": 5000,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 0.0001,
        **common,
        "warmup_type": "linear",
    }


def test_a_torch_schedule_keeps_its_arguments() -> None:
    assert schedule("StepLR", step_size=3, gamma=0.5) == ("StepLR", {"step_size": 3, "gamma": 0.5})


@pytest.mark.parametrize(
    ("keys", "piece"),
    [
        ({"type": "WarmupDecayLR"}, "scheduler.params.total_num_steps is missing"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 1}}, "did you mean scheduler.params.warmup_num_steps"),
        ({"type": "WarmupLR", "params": {"total_num_steps": 1}}, "not an argument of the chosen type"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "scheduler.params.warmup_num_steps = 0"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "'log' or 'linear'"),
        ({"type": "OneCycle"}, "OneCycleLR"),
        ({"type": "LRRangeTest"}, "CyclicLR"),
        ({"type": "LambdaLR"}, "pass lr_scheduler to initialize"),
    ],
)
def test_a_wrong_schedule_is_answered_with_the_cure(keys: dict[str, Any], piece: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"scheduler": keys})
    assert piece in str(caught.value)


def test_a_run_that_ends_in_warmup_is_pointed_out() -> None:
    (warning,) = load_config({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}}).warnings
    assert "ends in warm-up" in warning
