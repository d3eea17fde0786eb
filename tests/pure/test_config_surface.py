"""Every documented DeepSpeed key is read, accepted without effect, or refused by name: none is unknown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from shardledger.config import Config, load_config
from shardledger.config.findings import join
from shardledger.config.known_keys import RULES
from shardledger.config.section import Section, hints, section_of
from shardledger.config.values import KINDS
from shardledger.errors import ConfigError

# DeepSpeed 0.19 with the defaults its code has: a file that spells all of them out asks for nothing special.
ZERO_DEFAULTS: dict[str, Any] = {
    "stage": 0,
    "contiguous_gradients": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "use_multi_rank_bucket_allreduce": True,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": None,
    "load_from_fp32_weights": True,
    "elastic_checkpoint": False,
    "offload_param": {"device": "none", "nvme_path": None, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9,
                      "pin_memory": True},
    "offload_optimizer": {"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True,
                          "pipeline_read": False, "pipeline_write": False, "fast_init": False, "ratio": 1.0,
                          "super_offload": False, "cpuadam_cores_perc": 0.8},
    "zenflow": None,
    "sub_group_size": 1e9,
    "stage3_prefetch_bucket_size": 5e7,
    "stage3_param_persistence_threshold": 1e5,
    "stage3_model_persistence_threshold": 9223372036854775807,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": False,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "ignore_unused_parameters": True,
    "legacy_stage1": False,
    "round_robin_gradients": False,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "zeropp_loco_param": None,
    "mics_shard_size": -1,
    "mics_hierarchical_params_gather": False,
    "memory_efficient_linear": True,
    "pipeline_loading_checkpoint": False,
    "override_module_apply": True,
    "log_trace_cache_warnings": False,
    "enable_sanity_checks": False,
    "save_muon_momentum_buffer_in_memory": False,
    "leaf_module": {"classes": [], "names": [], "name_suffixes": []},
}  # fmt: skip
TOP_DEFAULTS: dict[str, Any] = {
    "train_batch_size": None,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": None,
    "fp16": {"enabled": False, "auto_cast": False, "loss_scale": 0, "initial_scale_power": 16,
             "loss_scale_window": 1000, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1,
             "fp16_master_weights_and_grads": False},
    "bf16": {"enabled": False, "immediate_grad_update": False, "check_grad_overflow": True,
             "bf16_master_weights_and_grads": False, "bf16_optimizer_states": False},
    "data_types": {"grad_accum_dtype": None, "param_dtype": None, "buffer_dtype": None},
    "communication_data_type": None,
    "seq_parallel_communication_data_type": "fp32",
    "torch_autocast": {"enabled": False, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "gradient_predivide_factor": 1.0,
    "gradient_allreduce_op": "mean",
    "managed_gradient_accumulation": True,
    "steps_per_print": None,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "dump_state": False,
    "zero_allow_untested_optimizer": False,
    "zero_force_ds_cpu_optimizer": True,
    "dataloader_drop_last": False,
    "disable_allgather": False,
    "log_level": None,
    "vocabulary_size": 50257,
    "sequence_parallel_size": 1,
    "data_parallel_size": 1,
    "sparse_gradients": False,
    "use_data_before_expert_parallelism": False,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": True, "torch_adam": False},
                  "legacy_fusion": False},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": None, "warmup_num_steps": 1000,
                                                 "warmup_type": "log"}},
    "activation_checkpointing": {"partition_activations": False, "contiguous_memory_optimization": False,
                                 "synchronize_checkpoint_boundary": False, "profile": False,
                                 "cpu_checkpointing": False, "number_checkpoints": None},
    "aio": {"block_size": 1048576, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False,
            "overlap_events": True, "use_gds": False},
    "checkpoint": {"tag_validation": "Warn", "load_universal": False, "use_node_local_storage": False,
                   "parallel_write": {"pipeline_stage": False}, "checkpoint_serialization": True,
                   "writer": {"type": "fast", "io_buffer_size": 67108864}},
    "comms_logger": {"enabled": False, "verbose": False, "prof_all": True, "prof_ops": [], "debug": False},
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "run"},
    "wandb": {"enabled": False, "group": None, "team": None, "project": "p"},
    "csv_monitor": {"enabled": False, "output_path": "", "job_name": "run"},
    "comet": {"enabled": False, "samples_log_interval": 100, "project": None},
    "flops_profiler": {"enabled": False, "recompute_fwd_factor": 0, "profile_step": 1, "module_depth": -1,
                       "top_modules": 1, "detailed": True, "output_file": None},
    "timers": {"throughput": {"enabled": True, "synchronized": True}},
    "autotuning": {"enabled": False, "fast": True, "metric": "throughput", "mp_size": 1},
    "compile": {"deepcompile": False, "free_activation": False, "keep_int_input_tensors": True},
    "elasticity": {"enabled": False, "micro_batch_sizes": [2, 4, 6], "version": 0.2},
    "hybrid_engine": {"enabled": False},
    "pipeline": {},
    "tensor_parallel": {},
    "data_efficiency": {"enabled": False},
    "amp": {"enabled": False},
    "nebula": {"enabled": False},
    "zero_optimization": ZERO_DEFAULTS,
}  # fmt: skip

SWITCHED_ON: list[tuple[dict[str, Any], str]] = [
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp32"),
    ({"torch_autocast": {"enabled": True}, "bf16": {"enabled": True}}, "autocast"),
    ({"tensorboard": {"enabled": True}}, "metrics.jsonl"),
    ({"wandb": {"enabled": True}}, "metrics.jsonl"),
    ({"csv_monitor": {"enabled": "true"}}, "metrics.jsonl"),
    ({"comet": {"enabled": True}}, "metrics.jsonl"),
    ({"elasticity": {"enabled": True}}, "elastic"),
    ({"amp": {"enabled": True}}, "bf16"),
    ({"autotuning": {"enabled": True}}, "tuning"),
    ({"compile": {"deepcompile": True}}, "DeepCompile"),
    ({"hybrid_engine": {"enabled": True}}, "generation"),
    ({"pipeline": {"stages": 2}}, "pipeline parallelism"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor parallelism"),
    ({"compression_training": {"a": 1}}, "removed"),
    ({"sparse_attention": {"mode": "fixed"}}, "removed"),
    ({"sparse_gradients": True}, "dense"),
    ({"sequence_parallel_size": 2}, "sequence parallelism"),
    ({"managed_gradient_accumulation": False}, "gradient_accumulation_steps"),
    ({"zero_optimization": {"zero_quantized_weights": True}}, "ZeRO"),
    ({"zero_optimization": {"zero_hpz_partition_size": 4}}, "ZeRO"),
    ({"zero_optimization": {"mics_shard_size": 4}}, "MiCS"),
    ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
    ({"zero_optimization": {"legacy_stage1": True}}, "removed"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "nvme_path is missing"),
    ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs stage 3"),
    (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/x"},
                "offload_optimizer": {"device": "cpu"},
            }
        },
        "put both on nvme",
    ),
    ({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}, "not available yet"),
    ({"activation_checkpointing": {"cpu_checkpointing": True}}, "shardledger.activation_checkpointing"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "fp32"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "fp32"),
]


def test_a_file_with_all_of_deepspeeds_defaults_is_accepted_and_every_idle_key_is_listed() -> None:
    config = load_config(TOP_DEFAULTS)
    listed = {line.partition(":")[0] for line in config.no_effect}
    for path in ("aio", "comms_logger", "wandb", "zero_optimization.sub_group_size", "prescale_gradients",
                 "zero_optimization.stage3_max_reuse_distance", "activation_checkpointing.profile",
                 "zero_optimization.allgather_bucket_size", "zero_optimization.offload_param", "fp16.hysteresis",
                 "zero_optimization.stage3_prefetch_bucket_size"):  # fmt: skip
        assert path in listed
    assert all(line.partition(": ")[2] for line in config.no_effect)
    assert config.warnings == ()
    again = load_config(config.to_dict())
    assert again == config and again.no_effect == config.no_effect


@pytest.mark.parametrize(("keys", "cure"), SWITCHED_ON, ids=[str(keys) for keys, _ in SWITCHED_ON])
def test_what_is_not_available_is_refused_by_its_full_path_with_a_cure(keys: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys)
    (problem,) = caught.value.problems
    path, value = "", keys
    while isinstance(value, dict) and len(value) == 1:
        key, value = next(iter(value.items()))
        path = f"{path}.{key}".removeprefix(".")
    assert path.split(".")[0] in problem and cure in problem and "unknown" not in problem


def test_the_engines_own_keys_are_never_listed_as_without_effect() -> None:
    keys: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 1,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": 0,
            "stage3_param_persistence_threshold": 1,
            "stage3_model_persistence_threshold": 1,
            "stage3_max_live_parameters": 1,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": 1,
        "gradient_allreduce_op": "sum",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32", "param_dtype": "bf16"},
        "optimizer": {"type": "SGD", "params": {"lr": 1}},
        "scheduler": {"type": "WarmupLR"},
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "dataloader_drop_last": True,
        "shardledger": {"activation_checkpointing": True},
    }
    config = load_config(keys)
    assert config.no_effect == () and config.warnings == ()
    assert config.zero_optimization.prefetch_bucket_size == 0


def test_stage_3_keys_say_so_at_lower_stages() -> None:
    (line,) = load_config({"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 5e7}}).no_effect
    assert line == "zero_optimization.stage3_prefetch_bucket_size: only stage 3 reads it, and the stage is 2"


def test_keys_without_effect_still_have_a_type() -> None:
    with pytest.raises(ConfigError, match=r"zero_optimization\.contiguous_gradients = \"banana\""):
        load_config({"zero_optimization": {"contiguous_gradients": "banana"}})
    with pytest.raises(ConfigError, match=r"flops_profiler\.profile_step = -1"):
        load_config({"flops_profiler": {"profile_step": -1}})


@pytest.mark.parametrize("section", ["fp16", "zero_optimization", "aio", "optimizer", "shardledger"])
@pytest.mark.parametrize("value", [3, "text", []])
def test_a_section_must_be_an_object(section: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{section} = .*object"):
        load_config({section: value})


def _fields(model: type[Section], path: str) -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        yield join(path, name), field
        child = section_of(field)
        if child is not None:
            assert child.__doc__
            yield from _fields(child, join(path, name))


def test_every_field_has_a_help_text_and_known_hints() -> None:
    for path, field in _fields(Config, ""):
        assert field.description and field.description[0].strip(), path
        assert hints(field).keys() <= {"auto", "no_effect", "from_stage", "when_off", "when_device", "bytes"}, path
        assert hints(field).get("auto", "plan") in ("plan", "budget", "ranks", "batch", "refuse"), path


def test_no_key_is_both_read_and_without_effect() -> None:
    for section, rules in RULES.items():
        fields = {path for path, _ in _fields(Config, "")}
        assert not {join(section, key) for key in rules} & fields
        for rule in rules.values():
            assert rule.reason and rule.kind in (*KINDS, "section")
            assert set((rule.keys or {}).values()) <= set(KINDS)


def test_classes_stay_small() -> None:
    models = {Config, *(section for _, field in _fields(Config, "") if (section := section_of(field)))}
    for model in models:
        assert len(model.__annotations__) <= 15, model
