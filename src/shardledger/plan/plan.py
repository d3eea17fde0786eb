"""The plan: what was decided, for every rank alike. Frozen, and the same on all ranks (see ``Plan.fingerprint``)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardledger.plan.roles import Home, Role


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes, as torch names without the ``torch.`` prefix."""

    compute: str
    """Dtype of weights in forward and backward."""
    accumulate: str
    """Dtype in which reduced gradients are kept (``data_types.grad_accum_dtype``)."""
    local_accumulate: str
    """Dtype in which unreduced gradients are kept over micro-batches, where gradients are not sharded."""
    wire: str
    """Dtype of gradients on the wire (``communication_data_type``)."""
    cast_inputs: bool
    """Whether fp32 tensors given to the model are cast to ``compute``."""
    autocast: str | None
    """Dtype of torch.autocast around forward passes, or None."""
    loss_scale: LossScale | None
    """None where losses are not scaled."""


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """The loss scale of fp16."""

    dynamic: bool
    initial: float
    window: int
    """Good steps before the scale doubles."""
    hysteresis: int
    """Overflows before it halves."""
    consecutive_hysteresis: bool
    minimum: float


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How bytes are moved."""

    reduce_bucket_numel: int
    """Most elements one gradient reduction has in flight."""
    overlap: bool
    """Whether a reduction may run while the backward pass goes on."""
    prefetch: bool
    """Whether the next unit is gathered while the current one computes."""
    max_live_numel: int
    """Most gathered elements that prefetching may reach."""
    average: bool
    """Mean over ranks (else sum)."""
    timeout_s: float
    """Seconds after which a silent rank is an error."""
    wire: str
    """How ranks on CPUs exchange payloads: ``"auto"`` (taken for shared memory until they have met), ``"shared_memory"`` or
    ``"gloo"``."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What happens between backward passes and the optimizer."""

    micro_batch: int
    accumulation: int
    """Micro-batches per optimizer step."""
    clip_norm: float
    """Largest global gradient norm; 0 is no clipping."""
    norm: str
    """Which norm that is: ``"l2"``, or ``"inf"``, the largest absolute value."""
    raise_on_nonfinite: bool
    """Raise when a gradient is inf or NaN, rather than skip the step."""
    max_consecutive_skips: int
    """Skipped steps in a row that end the run."""
    full_checks: bool
    """Whether parameters and batches are compared across ranks at every step."""


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where roles rest between uses."""

    optimizer: Home = Home.DEVICE
    """Home of masters and moments, and of the summed gradients they are stepped with."""
    params: Home = Home.DEVICE
    """Home of the shards of sharded parameters."""
    ratio: float = 1.0
    """Share of the elements, from the first unit on, whose optimizer states leave the device."""
    tile_numel: int = 1
    """Most elements whose states are stepped at once."""
    optimizer_path: str | None = None
    """Folder for the optimizer's file, where its home is the disk."""
    params_path: str | None = None
    buffers: int = 1
    """Tiles that may be in host memory at once on their way from and to the disk."""
    param_buffers: int = 1
    """Flats of parameters that may be in host memory at once on their way from the disk."""
    pinned: bool = False
    """Whether copies between host and device go through page-locked memory."""
    read_ahead: bool = True
    write_behind: bool = True

    @property
    def active(self) -> bool:
        """Whether anything leaves the device."""
        return self.optimizer is not Home.DEVICE or self.params is not Home.DEVICE


@dataclass(frozen=True, kw_only=True)
class Reporting:
    """What is said while training."""

    every: int | None
    """Steps between two printed lines; None prints nothing."""
    breakdown: bool
    """Whether the lines say where the time went."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """One unit: parameters that are gathered and reduced together."""

    path: str
    """Path of the module; ``""`` is the root unit."""
    parameters: tuple[str, ...]
    sharded: frozenset[Role]
    recompute: bool = False
    """Whether its activations are recomputed in backward."""

    @property
    def label(self) -> str:
        """Name for messages."""
        return self.path or "(root)"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything the engine needs to know about what the user asked for."""

    model_digest: str
    """What the plan is for: ``ModelSpec.digest``."""
    stage: int
    world: int
    units: tuple[UnitPlan, ...]
    leaves: tuple[tuple[str, ...], ...] = ()
    """Parameters of each module declared a leaf: when one of them gets a gradient, the others get zeros."""
    persistent: frozenset[str]
    """Parameters that stay gathered although their unit shards PARAM."""
    alignment: int
    """Each rank's interval of a flat buffer is a multiple of this many elements."""
    reproducible: bool
    """Every micro-batch is reduced, micro-batches are added in one tree with the ranks, slots are aligned: the result
    depends on the global batch, not on the number of ranks."""
    precision: Precision
    communication: Communication
    step: StepRule
    reporting: Reporting
    offload: Offload = field(default_factory=Offload)
    reasons: tuple[str, ...] = field(default=(), compare=False)
    """What was decided and why, one sentence each, for people."""

    def is_sharded(self, role: Role) -> bool:
        """Whether any unit shards ``role``."""
        return any(role in unit.sharded for unit in self.units)

    def agreed(self, wire: str) -> Plan:
        """The plan when the ranks have met and use ``wire``."""
        if wire not in ("shared_memory", "gloo"):
            return self
        reason = f"ranks exchange payloads through {wire} (shardledger.transport: {self.communication.wire})"
        communication = replace(self.communication, wire=wire)
        return replace(self, communication=communication, reasons=(*self.reasons, reason))

    @property
    def fingerprint(self) -> str:
        """Hex digest that is equal on all ranks exactly when their plans are."""
        return _digest(self._shared())

    @property
    def fingerprints(self) -> dict[str, str]:
        """The same of each part by its name, to tell in what two plans differ."""
        return {name: _digest(value) for name, value in self._shared().items()}

    def _shared(self) -> dict[str, Any]:
        """What must be alike on all ranks."""
        content = {k: v for k, v in asdict(self).items() if k not in ("reasons", "reporting")}
        for path in ("optimizer_path", "params_path"):
            del content["offload"][path]  # each machine may have its disk elsewhere
        return content


def _digest(content: object) -> str:
    def plain(value: object) -> object:
        if isinstance(value, (Role, Home)):
            return value.value
        if isinstance(value, (frozenset, set)):
            return sorted(v.value if isinstance(v, Role) else str(v) for v in value)
        raise TypeError(type(value).__name__)

    return hashlib.sha256(json.dumps(content, default=plain, sort_keys=True).encode()).hexdigest()
