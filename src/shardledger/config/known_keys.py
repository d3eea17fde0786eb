"""DeepSpeed's documented keys that the engine does not read: accepted without effect, or refused by name.

Keys the engine reads are fields in ``sections`` and ``model``. Together they are DeepSpeed's whole surface, so a key
found in neither place is a mistake of the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """What happens to one key.

    ``kind`` names the type of its value (see ``values.KINDS``) or is "section". ``reason`` says why the key has no
    effect, or, when ``refused``, what to do instead. ``harmless`` are the values of a refused key that are accepted,
    because they ask for nothing. A section is refused when its key ``switch`` is on (no switch: whenever it is given);
    ``keys`` are its keys with their kinds, None when they are not looked at.
    """

    kind: str
    reason: str
    refused: bool = False
    harmless: tuple[object, ...] = ()
    switch: str = ""
    keys: Mapping[str, str] | None = None


def _idle(kind: str, reason: str) -> Rule:
    return Rule(kind, reason)


def _refused(cure: str, *harmless: object) -> Rule:
    return Rule("any", cure, refused=True, harmless=harmless)


def _section(keys: str, reason: str, *, switch: str | None = None) -> Rule:
    """``switch`` None: the section has no effect; a key: refused when that key is on; "": refused when not empty."""
    kinds = None if keys == "*" else dict(entry.split(":") for entry in keys.split())
    return Rule("section", reason, refused=switch is not None, switch=switch or "", keys=kinds)


_RECORD = "metrics.jsonl in the run folder is the record; remove the section or set enabled to false"
_OFF = "switched off"
_ZEROPP = "quantized and hierarchical ZeRO++ communication is not available; remove the key"
_COUNTED = "communication is always counted; see engine.communication()"
_BY_UNIT = "parameters are gathered and reduced in units; shardledger.units names them"
_REMOVED = "DeepSpeed has removed it and it is not available here; remove the section"

TOP: Mapping[str, Rule] = {
    "prescale_gradients": _idle("bool", "gradients are summed in fp32, so no scaling is needed before the sum"),
    "gradient_predivide_factor": _idle("number", "gradients are summed in fp32, so nothing is divided before the sum"),
    "managed_gradient_accumulation": _refused(
        "the engine counts micro-batches itself; set gradient_accumulation_steps to 1 if every step() is to apply", True
    ),
    "memory_breakdown": _idle("bool", "the ledger is always written; see engine.ledger()"),
    "dump_state": _idle("bool", "config.resolved.json in the run folder holds the effective values"),
    "zero_allow_untested_optimizer": _idle("bool", "any torch optimizer is run over this rank's pieces"),
    "zero_force_ds_cpu_optimizer": _idle("bool", "torch's own optimizers are used everywhere"),
    "disable_allgather": _idle("bool", "DeepSpeed does not read it either"),
    "log_level": _idle("text", "logging is configured by the program"),
    "vocabulary_size": _idle("count", "DeepSpeed uses it for a hint only"),
    "seq_parallel_communication_data_type": _idle("dtype", "there is no sequence parallelism"),
    "use_data_before_expert_parallelism": _idle("bool", "there is no expert parallelism"),
    "sequence_parallel_size": _refused("sequence parallelism is not available; use 1", 1),
    "data_parallel_size": _refused("all ranks are data-parallel; remove the key or use 1", 1),
    "sparse_gradients": _refused("sparse gradients are not available; use dense embeddings", False),
    "aio": _section(
        "block_size:count queue_depth:count intra_op_parallelism:count single_submit:bool overlap_events:bool "
        "use_gds:bool thread_count:count",
        "the disk is read and written by threads, in pieces of 4 MiB, past the page cache",
    ),
    "checkpoint": _section(
        "tag_validation:text load_universal:bool use_node_local_storage:bool parallel_write:object writer:object "
        "checkpoint_serialization:bool",
        "checkpoints are written in shardledger's own format",
    ),
    "comms_logger": _section("enabled:bool verbose:bool prof_all:bool prof_ops:list debug:bool", _COUNTED),
    "flops_profiler": _section(
        "enabled:bool recompute_fwd_factor:number profile_step:count module_depth:int top_modules:count detailed:bool "
        "output_file:any",
        "there is no FLOP profiler; metrics.jsonl holds the speed of every step",
    ),
    "timers": _section("throughput:object", "throughput is always measured; see metrics.jsonl"),
    "tensorboard": _section("enabled:bool output_path:text job_name:text", _RECORD, switch="enabled"),
    "wandb": _section("enabled:bool group:any team:any project:text", _RECORD, switch="enabled"),
    "csv_monitor": _section("enabled:bool output_path:text job_name:text", _RECORD, switch="enabled"),
    "comet": _section(
        "enabled:bool samples_log_interval:count project:any workspace:any api_key:any experiment_name:any "
        "experiment_key:any online:any mode:any",
        _RECORD,
        switch="enabled",
    ),
    "autotuning": _section(
        "enabled:bool fast:bool results_dir:any exps_dir:any overwrite:bool start_profile_step:count "
        "end_profile_step:count metric:text tuner_type:text tuner_early_stopping:count tuner_num_trials:count "
        "arg_mappings:any model_info:any mp_size:count max_train_batch_size:any min_train_batch_size:any "
        "max_train_micro_batch_size_per_gpu:count min_train_micro_batch_size_per_gpu:count "
        "num_tuning_micro_batch_sizes:count",
        "there is no tuning by trial runs; set enabled to false",
        switch="enabled",
    ),
    "compile": _section(
        "deepcompile:bool free_activation:bool free_activation_threshold:count offload_activation:bool "
        "offload_activation_pin_memory:bool offload_opt_states:bool offload_parameters:bool double_buffer:bool "
        "symmetric_memory:bool debug_log:bool sync_before_reduce:bool sync_after_reduce:bool "
        "sync_before_allgather:bool sync_after_allgather:bool keep_int_input_tensors:bool "
        "keep_all_input_tensors:bool passes:any",
        "DeepCompile is not available; set deepcompile to false",
        switch="deepcompile",
    ),
    "elasticity": _section(
        "enabled:bool max_train_batch_size:count micro_batch_sizes:list min_gpus:count max_gpus:count min_time:count "
        "prefer_larger_batch:bool ignore_non_elastic_batch_info:bool version:number num_gpus_per_node:count "
        "model_parallel_size:count",
        "elastic batch sizes are not available; set enabled to false and give the batch sizes",
        switch="enabled",
    ),
    "amp": _section("*", "apex amp is not available; use bf16", switch="enabled"),
    "nebula": _section("*", "the Nebula service is not available; remove the section", switch="enabled"),
    "hybrid_engine": _section("*", "generation inside the engine is not available; remove it", switch="enabled"),
    "data_efficiency": _section("*", "data efficiency is not available; sample in your dataset", switch="enabled"),
    "curriculum_learning": _section("*", _REMOVED, switch="enabled"),
    "progressive_layer_drop": _section("*", _REMOVED, switch="enabled"),
    "eigenvalue": _section("*", _REMOVED, switch="enabled"),
    "quantize_training": _section("*", _REMOVED, switch="enabled"),
    "compression_training": _section("*", _REMOVED, switch=""),
    "sparse_attention": _section("*", _REMOVED, switch=""),
    "datastates_ckpt": _section("*", "asynchronous checkpoints are not available; remove the section", switch=""),
    "pipeline": _section("*", "pipeline parallelism is not available; remove the section", switch=""),
    "tensor_parallel": _section("*", "tensor parallelism is not available; remove the section", switch=""),
    "expert_parallel": _section("*", "expert parallelism is not available; remove the section", switch=""),
    "moe": _section("*", "expert parallelism is not available; remove the section", switch=""),
}  # fmt: skip
"""Top-level keys and sections."""

ZERO: Mapping[str, Rule] = {
    "contiguous_gradients": _idle("bool", "always contiguous here"),
    "reduce_scatter": _idle("bool", "sharded gradients always travel by reduce-scatter"),
    "allgather_partitions": _idle("bool", "DeepSpeed does not read it either"),
    "use_multi_rank_bucket_allreduce": _idle("bool", "sharded gradients always travel by reduce-scatter"),
    "load_from_fp32_weights": _idle("bool", "checkpoints hold the fp32 masters and are read from them"),
    "max_reuse_distance": _idle("count", "a unit is released after use and gathered again"),
    "module_granularity_threshold": _idle("int", _BY_UNIT),
    "use_all_reduce_for_fetch_params": _idle("bool", "parameters are always gathered by all-gather"),
    "allgather_sequential": _idle("bool", _BY_UNIT),
    "ignore_unused_parameters": _idle("bool", "unused parameters behave as in single-process torch"),
    "round_robin_gradients": _idle("bool", "every rank holds an equal interval of every unit"),
    "memory_efficient_linear": _idle("bool", "torch's linear layer is left as it is"),
    "pipeline_loading_checkpoint": _idle("bool", "a rank reads only what it holds"),
    "override_module_apply": _idle("bool", "torch.nn.Module is left as it is"),
    "log_trace_cache_warnings": _idle("bool", "the order of units is not traced into a cache"),
    "enable_sanity_checks": _idle("bool", "shardledger.checks decides what is verified"),
    "save_muon_momentum_buffer_in_memory": _idle("bool", "there is no Muon"),
    "grad_hooks": _idle("bool", "DeepSpeed's manual names it, its code does not"),
    "elastic_checkpoint": _refused("it is not available; remove the key", False),
    "legacy_stage1": _refused("DeepSpeed has removed it; remove the key", False),
    "zero_hpz_partition_size": _refused(_ZEROPP, 1),
    "zero_quantized_weights": _refused(_ZEROPP, False),
    "zero_quantized_nontrainable_weights": _refused(_ZEROPP, False),
    "zero_quantized_gradients": _refused(_ZEROPP, False),
    "zeropp_loco_param": _refused(_ZEROPP),
    "mics_shard_size": _refused("MiCS is not available and DeepSpeed has removed it; remove the key", -1),
    "mics_hierarchical_params_gather": _refused("MiCS is not available; remove the key", False),
    "zenflow": _section("*", "ZenFlow is not available; remove the section", switch=""),
}  # fmt: skip
"""Keys of ``zero_optimization``."""

OTHER: Mapping[str, Rule] = {"legacy_fusion": _idle("bool", "torch's own optimizers are used")}
"""Keys of ``optimizer``."""

RULES: Mapping[str, Mapping[str, Rule]] = {"": TOP, "zero_optimization": ZERO, "optimizer": OTHER}
"""All rules by section; "" is the top level."""

ALIASES: Mapping[str, Mapping[str, str]] = {
    "": {"bfloat16": "bf16"},
    "shardledger.checkpoint": {"async": "asynchronous"},
    "zero_optimization": {
        f"stage3_{name}": name
        for name in (
            "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
            "max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save",
            "module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential",
        )
    },
}  # fmt: skip
"""Second names of keys, by section: the name in the file -> the name here."""

DEPRECATED: Mapping[str, Mapping[str, str]] = {
    "zero_optimization": {
        "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        "cpu_offload_params": "offload_param",
        "cpu_offload_use_pin_memory": "offload_optimizer",
    }
}
"""Outdated keys, by section: the name in the file -> the key that replaced it."""

FOREIGN_WORDS: Mapping[str, str] = {
    "max_grad_norm": "use gradient_clipping at the top level",
    "clip_grad_norm": "use gradient_clipping at the top level",
    "gradient_accumulation_dtype": "use data_types.grad_accum_dtype",
    "fp32_allreduce": 'use communication_data_type: "fp32" at the top level',
    "learning_rate": "use lr in optimizer.params",
    "micro_batch_size": "use train_micro_batch_size_per_gpu at the top level",
    "check_overflow": "use bf16.check_grad_overflow",
}
"""Keys of other tools and of older files that resemble nothing closely enough, with what to write."""
