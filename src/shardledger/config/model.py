"""The whole configuration as one frozen object: what ``load_config`` returns."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from shardledger.config.findings import Notes
from shardledger.config.optimizer import OptimizerSection
from shardledger.config.scheduler import SchedulerSection
from shardledger.config.section import Section
from shardledger.config.sections import (
    ActivationCheckpointingSection,
    Bf16Section,
    DataTypesSection,
    Fp16Section,
    OffloadOptimizerSection,
    OffloadParamSection,
    ShardledgerSection,
    TorchAutocastSection,
    ZeroSection,
)
from shardledger.config.values import AUTO, DtypeName, Flag, NonNegative, Positive, Precision, StepInterval, dtype_name
from shardledger.errors import ConfigError

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STAGE = "zero_optimization.stage"
_BATCH: dict[str, Any] = {"auto": "batch"}


class BatchSizes(Section):
    """The batch triple, in samples: train = micro x accumulation x world. All three are known after loading."""

    train_batch_size: Positive = Field(
        1, description="samples per optimizer step over all ranks", json_schema_extra=_BATCH
    )
    train_micro_batch_size_per_gpu: Positive = Field(
        1, description="samples in one forward of one rank", json_schema_extra=_BATCH
    )
    gradient_accumulation_steps: Positive = Field(
        1, description="micro-batches a rank adds up before a step", json_schema_extra=_BATCH
    )


class PrecisionChoice(Section):
    """The dtypes of computation, accumulation and the wire."""

    bf16: Bf16Section = Field(default_factory=Bf16Section, description="computation in bfloat16")
    fp16: Fp16Section = Field(default_factory=Fp16Section, description="computation in float16")
    data_types: DataTypesSection = Field(default_factory=DataTypesSection, description="dtypes that differ")
    torch_autocast: TorchAutocastSection = Field(
        default_factory=TorchAutocastSection, description="forward passes under torch.autocast"
    )
    communication_data_type: DtypeName | None = Field(
        None,
        description="dtype of gradients on the wire; not given: the dtype of computation",
        json_schema_extra={"auto": "plan"},
    )

    @property
    def precision(self) -> Precision:
        """The dtype of computation: "fp32", "bf16" or "fp16"."""
        if self.bf16.enabled:
            return "bf16"
        return "fp16" if self.fp16.enabled else "fp32"


class Config(BatchSizes, PrecisionChoice):
    """A checked configuration. Made by ``load_config``; equal when ``to_dict`` is equal."""

    zero_optimization: ZeroSection = Field(default_factory=ZeroSection, description="what is sharded over the ranks")
    gradient_clipping: NonNegative = Field(
        0.0, description="largest global gradient norm; 0 switches clipping off (DeepSpeed 0.19 clips at 1.0 unasked)"
    )
    gradient_allreduce_op: Literal["mean", "sum"] = Field(
        "mean", description="how gradients of ranks are combined; micro-batches are averaged either way"
    )
    optimizer: OptimizerSection | None = Field(
        None, description="the optimizer to build", json_schema_extra={"auto": "refuse"}
    )
    scheduler: SchedulerSection | None = Field(
        None, description="the learning-rate schedule to build", json_schema_extra={"auto": "refuse"}
    )
    activation_checkpointing: ActivationCheckpointingSection = Field(
        default_factory=ActivationCheckpointingSection, description="DeepSpeed's checkpointing of activations"
    )
    steps_per_print: StepInterval = Field(None, description="steps between two printed lines; not given: no lines")
    wall_clock_breakdown: Flag = Field(False, description="time the parts of a step")
    dataloader_drop_last: Flag = Field(False, description="drop the last, smaller batch of the training data")
    shardledger: ShardledgerSection = Field(
        default_factory=ShardledgerSection, description="the keys DeepSpeed does not have"
    )
    _notes: Notes = PrivateAttr(default_factory=Notes)

    @property
    def no_effect(self) -> tuple[str, ...]:
        """Keys accepted without effect, as ``full.key.path: reason``."""
        return self._notes.no_effect

    @property
    def resolutions(self) -> tuple[str, ...]:
        """Values derived while loading, as ``key = value (rule)``."""
        return self._notes.resolutions

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should change although it works."""
        return self._notes.warnings

    def to_dict(self) -> dict[str, Any]:
        """Return the effective configuration, JSON-ready, in DeepSpeed's key names.

        Keys without effect that were given are in it, so loading the result at the same world size gives an equal
        configuration.
        """
        content = _merged(super().to_dict(), self._notes.inert)
        if self.stage_is_open:
            content["zero_optimization"] = {**content.get("zero_optimization", {}), "stage": AUTO}
        return content

    @property
    def stage_is_open(self) -> bool:
        """Whether the stage is still to be chosen by the memory budget; ``zero_optimization.stage`` says 0 until then."""
        return _STAGE in self._notes.auto

    def decided(
        self,
        *,
        stage: int,
        activation_checkpointing: bool,
        unit_stages: Mapping[str, int] | None = None,
        recomputed_units: Sequence[str] = (),
        offload: str = "none",
        why: str = "chosen by the memory budget",
    ) -> Config:
        """The configuration with the stage that was open, and whether activations are recomputed, filled in.

        ``unit_stages`` and ``recomputed_units`` are as the keys of those names; empty: all units alike. ``offload`` is
        ``"none"`` (what the file says stays), ``"optimizer:cpu"`` or ``"optimizer:cpu+param:cpu"``.
        """
        moved: dict[str, Any] = {"stage": stage}
        if "optimizer:cpu" in offload:
            moved["offload_optimizer"] = OffloadOptimizerSection(device="cpu")
        if "param:cpu" in offload:
            moved["offload_param"] = OffloadParamSection(device="cpu")
        zero = self.zero_optimization.model_copy(update=moved)
        changes = {
            "activation_checkpointing": activation_checkpointing,
            "unit_stages": dict(unit_stages) if unit_stages else None,
            "recomputed_units": tuple(recomputed_units) or None,
            "memory_budget": None,
        }
        own = self.shardledger.model_copy(update=changes)
        switch = str(activation_checkpointing).lower()
        line = f"zero_optimization.stage = {stage}, shardledger.activation_checkpointing = {switch} ({why})"
        notes = replace(self._notes, auto=self._notes.auto - {_STAGE}, resolutions=(*self.resolutions, line))
        return with_notes(self.model_copy(update={"zero_optimization": zero, "shardledger": own}), notes)

    def agreed(self, transport: str) -> Config:
        """The configuration when the ranks have met and use ``transport``; a wish that was not met is no longer in it."""
        if transport not in ("shared_memory", "gloo"):
            return self
        own = self.shardledger
        if transport == "gloo":
            own = own.model_copy(update={"transport": transport})
        asked = self.shardledger.transport or "auto"
        line = f"shardledger.transport = {transport} ({asked}: agreed by the ranks)"
        notes = replace(self._notes, resolutions=(*self.resolutions, line))
        return with_notes(self.model_copy(update={"shardledger": own}), notes)

    def summary(self) -> tuple[str, ...]:
        """Return the effective values that decide a run, one line each, and where they come from."""
        micro, accumulation = self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps
        ranks = self.train_batch_size // (micro * accumulation)
        by_inf = self.gradient_clipping and self.shardledger.gradient_clipping_norm == "inf"
        clipped = " (largest absolute value)" if by_inf else ""
        return (
            f"source: {self._notes.source}",
            f"precision: {self.precision}",
            f"zero stage: {self.zero_optimization.stage}",
            f"batch: {self.train_batch_size} = micro {micro} x accumulation {accumulation} x ranks {ranks}",
            f"gradient clipping: {self.gradient_clipping or 'off'}{clipped}",
            *self.resolutions,
        )

    def conflicts_with(
        self,
        *,
        micro_batch: int | None = None,
        gradient_accumulation_steps: int | None = None,
        precision: str | None = None,
        source: str = "an argument",
    ) -> None:
        """Refuse values from ``source`` (a call's argument, a data loader) that contradict this configuration.

        A batch size the file does not state contradicts nothing; a precision it does not state is fp32. Raises
        ConfigError that names each pair of values and where both come from.
        """
        problems = []
        claims = (
            (BATCH_KEYS[1], micro_batch, {BATCH_KEYS[0], BATCH_KEYS[1]}),
            (BATCH_KEYS[2], gradient_accumulation_steps, {BATCH_KEYS[2]}),
        )
        for key, claimed, basis in claims:
            mine = getattr(self, key)
            if claimed is not None and claimed != mine and basis & self._notes.stated:
                problems.append(f"{key} is {mine} in {self._notes.source} but {claimed} in {source}; keep one of them")
        if precision is not None:
            problems += self._precision_conflict(precision, source)
        if problems:
            raise ConfigError(*problems)

    def _precision_conflict(self, precision: str, source: str) -> list[str]:
        try:
            claimed = dtype_name(precision)
        except ValueError as error:
            return [f"precision from {source}: {error}"]
        if claimed == self.precision:
            return []
        said = {"bf16": "bf16.enabled is true", "fp16": "fp16.enabled is true", "fp32": "neither bf16 nor fp16 is on"}
        return [
            f"precision is {self.precision} in {self._notes.source} ({said[self.precision]}) "
            f"but {claimed} in {source}; change one of them"
        ]

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, Config) else NotImplemented

    def __hash__(self) -> int:
        return hash(json.dumps(self.to_dict(), sort_keys=True))


def with_notes(config: Config, notes: Notes) -> Config:
    """Return the configuration with what was found while it was read."""
    noted = config.model_copy()
    noted._notes = notes
    return noted


def _merged(values: Mapping[str, Any], inert: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for key, value in inert.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = _merged(result[key], value)
        else:
            result[key] = copy.deepcopy(value)
    return result
