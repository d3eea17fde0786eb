"""B56: misspelt, misplaced or obsolete keys are never ignored."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from shardledger.config import load_config
from shardledger.config.optimizer import TORCH_PARAMS
from shardledger.errors import ConfigError


@pytest.mark.parametrize(
    ("keys", "answer"),
    [
        ({"zero_optimization": {"overlap_com": True}}, "zero_optimization.overlap_com: unknown key; did you mean "
         "zero_optimization.overlap_comm?"),
        ({"zero_optimisation": {"stage": 2}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ({"gradient_cliping": 1.0}, "gradient_cliping: unknown key; did you mean gradient_clipping?"),
        ({"optimizer": {"type": "AdamW", "params": {"gradient_clipping": 1.0}}},
         "optimizer.params.gradient_clipping: unknown key here; gradient_clipping belongs at the top level"),
        ({"lr": 1e-3}, "lr: unknown key here; lr belongs in optimizer.params"),
        ({"stage": 2}, "stage: unknown key here; stage belongs in zero_optimization"),
        ({"optimizer": {"type": "AdamW", "lr": 1e-3}}, "optimizer.lr: unknown key here; lr belongs "
         "in optimizer.params"),
        ({"zero_optimization": {"pin_memory": True}}, "pin_memory belongs in zero_optimization.offload_param or in "
         "zero_optimization.offload_optimizer"),
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}}, "did you mean "
         "zero_optimization.offload_param.device?"),
        ({"activation_checkpointing": {"partitioned_activations": True}}, "did you mean "
         "activation_checkpointing.partition_activations?"),
        ({"gradient_accumulation_dtype": "fp32"}, "data_types.grad_accum_dtype"),
        ({"data_types": {"grad_accum_dtyp": "fp32"}}, "did you mean data_types.grad_accum_dtype?"),
        ({"aio": {"queue_dept": 8}}, "did you mean aio.queue_depth?"),
        ({"shardledger": {"unit": ["Block"]}}, "did you mean shardledger.units?"),
        ({"bf16": {"zzz": 1}}, "bf16.zzz: unknown key; valid here: bf16_master_weights_and_grads"),
        ({"foo": 1}, "foo: unknown key"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_an_error_with_its_full_path_and_the_nearest_key(keys: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys)
    (problem,) = caught.value.problems
    assert answer in problem


def test_all_problems_of_a_file_come_at_once() -> None:
    keys = {
        "zero_optimization": {"stage": 9, "overlap_com": True, "offload_param": {"device": "tape"}},
        "gradient_cliping": 1.0,
        "gradient_clipping": "lots",
        "train_batch_size": 7,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": -1, "beta": 1}},
        "scheduler": {"type": "WarmupDecayLR"},
        "fp16": {"enabled": True, "loss_scale": -1},
        "wandb": {"enabled": True},
        "shardledger": {"checks": "everything"},
    }
    with pytest.raises(ConfigError) as caught:
        load_config(keys, world=2)
    for piece in (
        "zero_optimization.stage = 9",
        "zero_optimization.overlap_com",
        "zero_optimization.offload_param.device",
        "gradient_cliping",
        'gradient_clipping = "lots"',
        "train_batch_size = 7",
        "optimizer.params.lr = -1",
        "optimizer.params.beta",
        "total_num_steps is missing",
        "fp16.loss_scale = -1",
        "wandb = ",
        "shardledger.checks",
    ):
        assert sum(piece in problem for problem in caught.value.problems) == 1, piece
    assert len(caught.value.problems) == 12


@pytest.mark.parametrize("by_argument", [True, False])
def test_lenient_reading_turns_unknown_keys_into_warnings(by_argument: bool) -> None:
    keys: dict[str, Any] = {
        "zero_optimization": {"overlap_com": True},
        "optimizer": {"type": "SGD", "params": {"q": 1}},
    }
    if not by_argument:
        keys["shardledger"] = {"lenient": True}
    config = load_config(keys, lenient=True if by_argument else None)
    assert len(config.warnings) == 2 and "zero_optimization.overlap_comm" in config.warnings[0]
    assert config.shardledger.lenient is True
    assert config.optimizer is not None and config.optimizer.params == {}
    with pytest.raises(ConfigError):
        load_config({**keys, "shardledger": {"lenient": True}}, lenient=False)


def test_lenient_reading_still_refuses_what_is_wrong_or_not_available() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"zero_optimization": {"stage": 7, "zero_quantized_weights": True}}, lenient=True)
    assert len(caught.value.problems) == 2


def test_valid_keys_that_do_nothing_here_are_listed_with_a_reason() -> None:
    config = load_config({"zero_optimization": {"round_robin_gradients": True}, "comms_logger": {"enabled": False}})
    assert [line.partition(": ")[0] for line in config.no_effect] == [
        "comms_logger",
        "zero_optimization.round_robin_gradients",
    ]


def test_the_table_of_optimizer_arguments_is_torchs_signature() -> None:
    torch = pytest.importorskip("torch")
    for name, declared in TORCH_PARAMS.items():
        accepted = set(inspect.signature(getattr(torch.optim, name)).parameters) - {"params"}
        assert set(declared) == accepted, name
