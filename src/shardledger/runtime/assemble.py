"""Puts the parts of an engine together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shardledger.errors import EngineStateError
from shardledger.plan.plan import Plan
from shardledger.runtime.compiled import Forwards
from shardledger.runtime.describe import dtype_of
from shardledger.runtime.executor import Executor
from shardledger.runtime.gradients import FlatGradients, GradientMode, GradientRule
from shardledger.runtime.hooks import Hooks
from shardledger.runtime.offload import Offload
from shardledger.runtime.out_of_memory import Advise, Shortage, tell_shortage
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.placement import Site, place
from shardledger.runtime.progress import Progress
from shardledger.runtime.saved import SavedWeights
from shardledger.runtime.schedule import Schedule, UnitFacts
from shardledger.runtime.shards import Shards
from shardledger.runtime.step import Stepper
from shardledger.runtime.unit import Unit
from shardledger.runtime.watch import Watch
from shardledger.transport import Transport
from shardledger.transport.heap import give_memory_back


@dataclass(eq=False)
class Parts:
    """What an engine is made of."""

    units: list[Unit]
    schedule: Schedule
    executor: Executor
    hooks: Hooks
    transport: Transport
    plan: Plan
    watch: Watch
    saved: SavedWeights
    forwards: Forwards
    progress: Progress = field(default_factory=Progress)
    stepper: Stepper | None = None
    """Set by the engine."""
    mode: GradientMode = field(default_factory=GradientMode)
    scaling: bool = False
    """Whether losses must be scaled before their backward pass (fp16)."""
    scaled: bool = False
    """Whether the next backward pass starts from a scaled loss."""
    unsynced: bool = False
    """Whether gradients of this window have not been reduced by the last backward pass."""
    held_back: bool = False
    """Whether the last backward pass kept its gradients on this rank (``no_sync``)."""
    backward_at: int = -1
    """``progress.micro_steps`` when the last backward pass ended."""
    leaves: list[list[tuple[FlatGradients, int]]] = field(default_factory=list)
    """Trainable parameters of each module declared a leaf, as flat and index."""
    advise: Advise | None = None
    """What would help when memory runs out; None: nobody knows."""
    explain: Callable[[BaseException, str], Shortage] | None = None
    """The ledger of the moment, for an error and the phase it came in. Set by the engine."""
    offload: Offload | None = None
    """States that rest away from the device; None: there are none."""
    put_away: Any = None
    """States that the user has sent away for a while (``put_away.PutAway``)."""
    saver: Any = None
    """Saves and loads the engine; given by the composition root, because this room may not know that one."""
    on_destroy: Callable[[], None] | None = None
    """Ends what initialize began beside the engine: the process group, when it made it."""

    @property
    def released(self) -> bool:
        """Whether some weights are not always there."""
        return any(unit.sharded_flats for unit in self.units)

    def at_hand(self, flats: Sequence[FlatParameters], *, write: bool = False) -> AbstractContextManager[None]:
        """Masters, shards and optimizer states of ``flats`` are at hand inside, wherever they rest; ``write``: changes
        are kept."""
        self.usable()
        if self.offload is None:
            return nullcontext()
        if write and self.executor.shards is not None:
            self.executor.shards.forget()
        return self.offload.opened(flats, self.stepper.optimizer if self.stepper else None, write=write)

    def usable(self) -> Parts:
        """Itself.

        Raises:
            EngineStateError: states are away, or lost with a disk that failed.
        """
        if self.offload is not None:
            self.offload.check()
        if self.put_away is not None:
            raise EngineStateError(
                f"the engine's {', '.join(self.put_away.names)} were sent away by offload_states: call "
                f"engine.reload_states() before using the engine again."
            )
        return self

    def enter(self, phase: str) -> None:
        """Note where training stands, for the messages of the transport."""
        self.transport.where = f"step {self.progress.global_steps + 1}, {phase}"

    def tell_shortage(self, error: BaseException, otherwise: str = "forward") -> None:
        """Tell the ledger if ``error``, which the engine's own calls did not see, says that memory ran out."""
        explain, phase = self.explain, "backward" if self.schedule.in_backward else otherwise
        if explain is not None:
            tell_shortage(error, lambda error: explain(error, phase))

    def forward_begins(self, broken: bool) -> None:
        """Refuse as ``usable`` does; clean up after a backward pass that died half-way (``broken``)."""
        self.usable()
        if broken:
            self.abort()

    def backward_begins(self) -> None:
        """Note the phase, and refuse an unscaled loss in fp16.

        Raises:
            EngineStateError: its gradients would be divided by a scale they never had, or states are away.
        """
        self.usable()
        self.enter("backward")
        if self.scaling and not self.scaled:
            raise EngineStateError(
                "loss.backward() was called in fp16 without the loss scale. Call engine.backward(loss), or "
                "engine.scale(loss).backward()."
            )

    def backward_ended(self) -> None:
        """Reduce what is left and release everything."""
        self.executor.perform(self.schedule.end_backward(self.executor.late()))
        self.scaled = False
        self.unsynced = not (self.executor.sync and self.executor.boundary)
        self.held_back = not self.executor.sync
        self.backward_at = self.progress.micro_steps
        self._fill_leaves()
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.end_backward()

    def _fill_leaves(self) -> None:
        """Parameters of a leaf that got no gradient have a gradient of zeros when others of the leaf got one."""
        for leaf in self.leaves:
            if any(gradients.present[index] for gradients, index in leaf):
                for gradients, index in leaf:
                    gradients.present[index] = True

    def abort(self) -> None:
        """Clean up after an exception: wait for what is under way, return to shards, drop the window's gradients."""
        self.executor.drain()
        self.executor.perform(self.schedule.abort(), after_failure=True)
        for unit in self.units:
            for gradients in unit.gradients:
                gradients.reset()
        self.unsynced = self.scaled = False


def assemble(site: Site) -> Parts:
    """Place the model and attach to it."""
    units = place(site)
    plan = site.plan
    schedule = Schedule(
        [_facts(unit) for unit in units],
        prefetch=plan.communication.prefetch,
        max_live_numel=plan.communication.max_live_numel,
    )
    executor = Executor(units, site.transport, plan)
    if site.offload is not None:
        executor.shards = Shards(site.offload)
    forwards = Forwards(site.device.type)
    for unit in units:
        if unit.plan.recompute:
            forwards.recompute(unit.module)
    parts: list[Parts] = []
    hooks = Hooks(
        units,
        schedule,
        executor,
        on_forward_begin=lambda broken: parts[0].forward_begins(broken),
        on_backward_begin=lambda: parts[0].backward_begins(),
        on_backward_end=lambda: parts[0].backward_ended(),
        on_failure=lambda error: parts[0].tell_shortage(error),
    )
    parts.append(
        Parts(
            units,
            schedule,
            executor,
            hooks,
            site.transport,
            plan,
            Watch(site.model, units, site.offload),
            SavedWeights(units, hooks.gather_on_demand),
            forwards,
            scaling=plan.precision.loss_scale is not None,
            mode=GradientMode(link=None if site.offload is None else site.offload.link),
            offload=site.offload,
        )
    )
    rule = GradientRule(
        dtype_of(plan.precision.accumulate),
        dtype_of(plan.precision.local_accumulate),
        plan.reproducible,
        drops_sums=not site.one_memory,
    )
    for unit in units:
        trainable = [flat for flat in unit.flats if flat.layout.trainable]
        largest = max(trainable, key=lambda flat: flat.layout.numel, default=None)
        for flat in trainable:
            gradients = FlatGradients(flat, rule, parts[0].mode, listener=hooks, leads=flat is largest)
            unit.gradients.append(gradients)
    parts[0].leaves = _leaves(units, plan)
    return parts[0]


def take_apart(parts: Parts) -> None:
    """Detach from the model and let go of every tensor now, not when Python next looks for cycles.

    Parameters that are whole keep their values; those that are sharded have none until they are loaded.
    """
    try:
        if parts.put_away is not None:
            parts.put_away.end()
    finally:
        _let_go(parts)


def _let_go(parts: Parts) -> None:
    parts.put_away = None
    parts.hooks.remove()
    parts.leaves.clear()
    parts.executor.forget()
    if parts.stepper is not None:
        parts.stepper.forget()
    parts.stepper = parts.explain = None
    parts.forwards.restore()
    for unit in parts.units:
        for gradients in unit.gradients:
            gradients.forget()
        for flat in unit.flats:
            flat.forget()
        unit.gradients.clear()
        unit.flats.clear()
    if parts.offload is not None:
        parts.offload.close()
    give_memory_back()


def weights_of(units: Sequence[Unit]) -> list[torch.Tensor]:
    """Every tensor whose storage holds weights."""
    return [flat.full for unit in units for flat in unit.flats]


def _leaves(units: Sequence[Unit], plan: Plan) -> list[list[tuple[FlatGradients, int]]]:
    if not plan.leaves:
        return []
    places = {
        slot.name: (gradients, index)
        for unit in units
        for gradients in unit.gradients
        for index, slot in enumerate(gradients.flat.layout.slots)
    }
    return [[places[name] for name in names if name in places] for names in plan.leaves]


def _facts(unit: Unit) -> UnitFacts:
    sharded = unit.sharded_flats
    return UnitFacts(
        sharded=bool(sharded),
        trainable=any(flat.layout.trainable for flat in unit.flats),
        frozen=any(not flat.layout.trainable for flat in sharded),
        numel=sum(flat.layout.padded_numel for flat in sharded),
    )
