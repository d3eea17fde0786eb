"""The sections of a configuration file that the engine reads, with DeepSpeed's key names and one default each."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from shardledger.config.section import Section
from shardledger.config.values import ByteSize, Count, DtypeName, Flag, Folder, Number, Positive, Stage, Whole

_PLAN: dict[str, Any] = {"auto": "plan"}
_PLAN_STAGE_3: dict[str, Any] = {"auto": "plan", "from_stage": 3}


def _idle(reason: str) -> dict[str, Any]:
    return {"no_effect": reason}


class Bf16Section(Section):
    """Computation in bfloat16 with fp32 master weights and moments. The older section name ``bfloat16`` works too."""

    enabled: Flag = Field(False, description="compute and communicate in bf16; master weights and moments stay fp32")
    immediate_grad_update: Flag = Field(
        False,
        description="accumulate as soon as a gradient exists",
        json_schema_extra=_idle("a gradient joins its unit's flat gradient as soon as it exists"),
    )
    check_grad_overflow: Flag = Field(
        True,
        description="look for non-finite gradients before a step",
        json_schema_extra=_idle("gradients are always checked, together with the norm"),
    )
    bf16_master_weights_and_grads: Flag = Field(False, description="bf16 master weights; only false is available")
    bf16_optimizer_states: Flag = Field(False, description="bf16 moments; only false is available")


_SCALE: dict[str, Any] = {"when_off": "fp16 is off, so there is no loss scale"}


class Fp16Section(Section):
    """Computation in float16 with fp32 master weights and moments, and a loss scale that keeps gradients in range."""

    enabled: Flag = Field(False, description="compute and communicate in fp16; master weights and moments stay fp32")
    auto_cast: Flag = Field(
        False, description="cast inputs to fp16", json_schema_extra=_idle("shardledger.cast_inputs casts them already")
    )
    loss_scale: Number = Field(0.0, ge=0, description="fixed loss scale; 0 is dynamic", json_schema_extra=_SCALE)
    initial_scale_power: Count = Field(16, description="first dynamic scale, as a power of 2", json_schema_extra=_SCALE)
    loss_scale_window: Positive = Field(
        1000, description="good steps before the scale doubles", json_schema_extra=_SCALE
    )
    hysteresis: Positive = Field(2, description="overflows before the scale halves", json_schema_extra=_SCALE)
    consecutive_hysteresis: Flag = Field(
        False, description="refill hysteresis on every good step", json_schema_extra=_SCALE
    )
    min_loss_scale: Number = Field(1.0, gt=0, description="smallest dynamic scale", json_schema_extra=_SCALE)
    fp16_master_weights_and_grads: Flag = Field(False, description="fp16 master weights; only false is available")


class TorchAutocastSection(Section):
    """Forward passes under torch.autocast: weights stay fp32, operations choose their dtype."""

    enabled: Flag = Field(False, description="run the model under torch.autocast")
    dtype: DtypeName = Field("bf16", description="dtype of the operations that autocast lowers")
    lower_precision_safe_modules: tuple[str, ...] | None = Field(
        None,
        description="classes whose gradients may travel in the lower dtype",
        json_schema_extra=_idle("communication_data_type decides the dtype on the wire"),
    )


class DataTypesSection(Section):
    """Dtypes that differ from the precision of the run."""

    grad_accum_dtype: DtypeName | None = Field(
        None, description="dtype in which micro-batch gradients are added up; not given: the plan decides"
    )
    param_dtype: DtypeName | None = Field(
        None, description="dtype parameters compute in; must say the same as bf16.enabled and fp16.enabled"
    )
    buffer_dtype: DtypeName | None = Field(
        None, description="dtype of buffers", json_schema_extra=_idle("buffers keep the dtype the model gives them")
    )


_ON_DISK: dict[str, Any] = {"when_device": "nvme"}


class OffloadOptimizerSection(Section):
    """Where masters, moments and the gradients they are stepped with rest between steps."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="none, cpu (host memory) or nvme (a disk)")
    nvme_path: Folder | None = Field(
        None, description="an existing folder on a fast local disk", json_schema_extra=_ON_DISK
    )
    buffer_count: Positive = Field(
        4,
        description="tiles in host memory on their way from and to disk; 3 are used at most",
        json_schema_extra=_ON_DISK,
    )
    pin_memory: Flag = Field(
        True, description="bytes between host and GPU pass through page-locked buffers of fixed size"
    )
    pipeline_read: Flag = Field(True, description="read the next tile while one is stepped", json_schema_extra=_ON_DISK)
    pipeline_write: Flag = Field(
        True, description="write the last tile while one is stepped", json_schema_extra=_ON_DISK
    )
    fast_init: Flag = Field(
        False,
        description="initialise state on disk in one pass",
        json_schema_extra=_idle("states are written when the first step has made them"),
    )
    ratio: Number = Field(1.0, ge=0, le=1, description="share of the elements whose state is offloaded")
    super_offload: Flag = Field(False, description="DeepSpeed's SuperOffload; only false is available")
    cpuadam_cores_perc: Number = Field(
        0.8,
        gt=0,
        le=1,
        description="share of the cores for the step of SuperOffload",
        json_schema_extra=_idle("the step on the host takes torch's threads; see torch.set_num_threads"),
    )


class OffloadParamSection(Section):
    """Where this rank's shards of sharded parameters rest while no unit needs them (stage 3)."""

    device: Literal["none", "cpu", "nvme"] = Field("none", description="none, cpu (host memory) or nvme (a disk)")
    nvme_path: Folder | None = Field(
        None, description="an existing folder on a fast local disk", json_schema_extra=_ON_DISK
    )
    buffer_count: Positive = Field(
        5, description="flats in host memory on their way from disk; 2 are used at most", json_schema_extra=_ON_DISK
    )
    buffer_size: Count = Field(
        100_000_000, description="elements moved at once; larger parameters are split", json_schema_extra=_ON_DISK
    )
    max_in_cpu: Count = Field(
        1_000_000_000,
        description="elements kept in host memory when the home is disk",
        json_schema_extra=_idle("everything whose home is the disk rests there; host memory holds buffers alone"),
    )
    pin_memory: Flag = Field(
        True, description="bytes between host and GPU pass through page-locked buffers of fixed size"
    )


class LeafModuleSection(Section):
    """Modules that are never cut into units, for experts and other branches that not every rank takes."""

    classes: tuple[str, ...] = Field((), description="class names, bare or with their module")
    names: tuple[str, ...] = Field((), description="paths of modules, as in model.named_modules()")
    name_suffixes: tuple[str, ...] = Field((), description="endings of such paths")


class ZeroSection(Section):
    """What is sharded over the ranks, and how it travels. Sizes are elements, not bytes; None leaves it to the plan."""

    stage: Whole = Field(
        0,
        ge=0,
        le=3,
        description="0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters; auto: the cheapest that "
        "keeps the peak under shardledger.memory_budget",
        json_schema_extra={"auto": "budget"},
    )
    reduce_bucket_size: Count | None = Field(
        None, description="elements reduced in one collective at most", json_schema_extra=_PLAN
    )
    allgather_bucket_size: Count | None = Field(
        None,
        description="elements gathered in one collective at most",
        json_schema_extra=_idle("parameters are gathered unit by unit"),
    )
    overlap_comm: Flag | None = Field(
        None, description="reduce while backward goes on computing", json_schema_extra=_PLAN
    )
    prefetch_bucket_size: Count | None = Field(
        None,
        description="elements gathered ahead of need at most; 0 switches prefetch off",
        serialization_alias="stage3_prefetch_bucket_size",
        json_schema_extra=_PLAN_STAGE_3,
    )
    param_persistence_threshold: Count | None = Field(
        None,
        description="parameters of at most this many elements stay gathered",
        serialization_alias="stage3_param_persistence_threshold",
        json_schema_extra=_PLAN_STAGE_3,
    )
    model_persistence_threshold: Count | None = Field(
        None,
        description="elements that may stay gathered in all",
        serialization_alias="stage3_model_persistence_threshold",
        json_schema_extra=_PLAN_STAGE_3,
    )
    max_live_parameters: Count | None = Field(
        None,
        description="elements that may be gathered at one time; limits prefetch",
        serialization_alias="stage3_max_live_parameters",
        json_schema_extra=_PLAN_STAGE_3,
    )
    gather_16bit_weights_on_model_save: Flag = Field(
        False,
        description="save_16bit_model writes full weights although parameters are sharded",
        serialization_alias="stage3_gather_16bit_weights_on_model_save",
        json_schema_extra={"from_stage": 3},
    )
    leaf_module: LeafModuleSection | None = Field(
        None, description="modules gathered and reduced as one with everything below them"
    )
    offload_param: OffloadParamSection | None = Field(None, description="where shards of parameters rest (stage 3)")
    offload_optimizer: OffloadOptimizerSection | None = Field(None, description="where optimizer states rest")
    sub_group_size: Positive | None = Field(
        None,
        description="most elements whose offloaded states are stepped at once; values above 4194304 change nothing",
    )


_RECOMPUTE = _idle("recomputing is switched by shardledger.activation_checkpointing")


class ActivationCheckpointingSection(Section):
    """DeepSpeed's settings for its own checkpoint function; ``shardledger.activation_checkpointing`` switches ours."""

    partition_activations: Flag = Field(
        False, description="split saved activations over model-parallel ranks", json_schema_extra=_RECOMPUTE
    )
    contiguous_memory_optimization: Flag = Field(
        False, description="copy saved activations into one buffer", json_schema_extra=_RECOMPUTE
    )
    synchronize_checkpoint_boundary: Flag = Field(
        False, description="synchronize the device at each boundary", json_schema_extra=_RECOMPUTE
    )
    profile: Flag = Field(False, description="time forward and backward", json_schema_extra=_RECOMPUTE)
    number_checkpoints: Count | None = Field(
        None, description="number of saved boundaries", json_schema_extra=_RECOMPUTE
    )
    cpu_checkpointing: Flag = Field(False, description="keep saved activations in host memory; only false is available")


class CheckpointSection(Section):
    """When checkpoints are written, and which stay."""

    every: Positive | None = Field(
        None, description="steps between two checkpoints of a run; not given: none but at SIGTERM"
    )
    asynchronous: Flag = Field(
        False,
        description="training waits only for the copy to host memory; a thread writes it to the disk",
        serialization_alias="async",
    )
    keep_last: Positive | None = Field(
        None, description="checkpoints that stay when newer ones come, of those with automatic tags; not given: all"
    )
    keep_every: Positive | None = Field(None, description="those of steps that this divides stay beside the last ones")


class RanksSection(Section):
    """Those keys of ``shardledger`` that say how the ranks work together."""

    timeout_s: Number = Field(600.0, gt=0, description="seconds a rank waits in a collective before the run ends")
    transport: Literal["shared_memory", "gloo"] | None = Field(
        None,
        description="how CPU ranks exchange payloads; not given: out of each other's memory where all are on one machine and "
        "may read it, else gloo",
        json_schema_extra={"auto": "ranks"},
    )
    reproducible: Flag = Field(
        False, description="results that depend on the global batch alone, not on the stage or the number of ranks"
    )
    checks: Literal["default", "full"] = Field(
        "default", description="full: compare parameters and batches across ranks at every step"
    )


class CompileSection(Section):
    """torch.compile of the units; the section being there turns it on."""

    backend: str = Field("inductor", description="backend of torch.compile")
    mode: str | None = Field(None, description="mode of torch.compile; not given: its default")
    dynamic: Flag | None = Field(
        None, description="compile for all shapes at once; not given: when a second shape comes"
    )
    fullgraph: Flag = Field(
        False, description="an error instead of a break where a unit cannot be compiled as one graph"
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """Of ``engine.compile``."""
        return {
            "backend": self.backend,
            "compile_kwargs": {"mode": self.mode, "dynamic": self.dynamic, "fullgraph": self.fullgraph},
        }


class StepSection(Section):
    """What a step does with the whole gradient; keys of ``shardledger``."""

    gradient_clipping_norm: Literal["l2", "inf"] = Field(
        "l2",
        description="norm of the whole gradient that gradient_clipping limits and the step reports: l2, or inf, the largest "
        "absolute value of an element",
    )
    nonfinite: Literal["skip", "raise"] = Field(
        "skip", description="what all ranks do when a gradient is inf or NaN: skip the step with a warning, or raise"
    )
    max_consecutive_skips: Positive = Field(
        10, description="steps skipped in a row after which the run ends (a dynamic loss scale has its own end)"
    )


class ShardledgerSection(RanksSection, StepSection):
    """The keys that DeepSpeed does not have."""

    units: tuple[str, ...] | None = Field(
        None,
        description="class names of the modules that are gathered and reduced as one; not given: the repeated blocks, and "
        "large embeddings and heads outside them",
        json_schema_extra=_PLAN,
    )
    activation_checkpointing: Flag = Field(
        False, description="keep only the inputs of each unit and recompute the rest in backward"
    )
    recomputed_units: tuple[str, ...] | None = Field(
        None,
        description="with activation_checkpointing: paths of the units that are recomputed; not given: all but the root",
        json_schema_extra=_PLAN,
    )
    unit_stages: dict[str, Stage] | None = Field(
        None,
        description="units that shard less than zero_optimization.stage says, and their stage: by path, or (root)",
        json_schema_extra=_PLAN,
    )
    cast_inputs: Flag = Field(
        True, description="cast fp32 tensors given to the model to the dtype of bf16 or fp16 training"
    )
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="when checkpoints are written, and which stay"
    )
    compile: CompileSection | None = Field(
        None, description="torch.compile of the forward of every unit, as {} or with its arguments; not given: none"
    )
    lenient: Flag = Field(False, description="unknown keys are warnings instead of errors")
    prefetch: Flag = Field(True, description="gather the next unit while this one computes (stage 3)")
    device_memory: ByteSize | None = Field(
        None,
        description="memory of one rank's device, as 80GiB; a plan that cannot fit is refused before anything is allocated",
        json_schema_extra={"bytes": True},
    )
    memory_budget: ByteSize | None = Field(
        None,
        description='with zero_optimization.stage "auto": memory of one rank\'s device that the peak must stay under',
        json_schema_extra={"bytes": True},
    )
