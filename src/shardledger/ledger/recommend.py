"""Which stage? The order of the ZeRO papers' advice, walked over planned rows, with a sentence for every step.

Plain data parallelism if it fits; stage 1 when optimizer states are too large; 2 when gradients are too; 3 when the
parameters themselves do not fit; then offload. Each step up costs something that the one before does not, so the first
that fits is the answer. Activations are another matter: every rank holds its own whatever the stage, so where they are
the problem the micro-batch shrinks or activations are recomputed, and the stage stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardledger.ledger.amounts import gib, parameters
from shardledger.ledger.fit import (
    OFFLOAD_ORDER,
    SLOW_LINK,
    Found,
    Rows,
    Situation,
    fits,
    per_batch,
    short_of,
    states_of,
)
from shardledger.ledger.row import Row
from shardledger.ledger.traffic import step_time

_TIGHT = 0.05
"""Share of the device's memory below which the headroom is called tight."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The answer, with its reasons in the order in which they were found."""

    row: Row | None
    """None: nothing fits."""
    estimated: bool = False
    """Whether the row was scaled from another micro-batch; plan again with it to be exact."""
    adapters: bool = False
    """Whether it is for LoRA adapters instead of the whole model."""
    reasons: tuple[str, ...]
    cautions: tuple[str, ...] = ()
    missing_bytes: int = 0
    """When nothing fits: bytes that the leanest choice lacks on the device."""
    missing_host_bytes: int = 0
    """When nothing fits for want of host memory: bytes lacking on one machine."""

    @property
    def reason(self) -> str:
        """Everything in one paragraph."""
        return " ".join((*self.reasons, *self.cautions))


def recommend(rows: Iterable[Row], situation: Situation, *, adapter_rows: Iterable[Row] = ()) -> Recommendation:
    """Choose among ``rows``, or among ``adapter_rows`` (the same with LoRA) when there is little to learn from."""
    whole, adapters = Rows(rows), Rows(adapter_rows)
    walk = _Walk(whole, situation)
    if situation.little_data:
        walk.say(_lora_sentence(whole, adapters, situation))
        if adapters.all:
            walk = _Walk(adapters, situation, walk.reasons, adapters=True)
    return walk.run()


class _Walk:
    """One walk up the stages."""

    def __init__(
        self, rows: Rows, situation: Situation, reasons: Sequence[str] = (), *, adapters: bool = False
    ) -> None:
        self.rows = rows
        self.situation = situation
        self.reasons = list(reasons)
        self.adapters = adapters

    def say(self, sentence: str) -> None:
        """Add a reason."""
        self.reasons.append(sentence)

    def run(self) -> Recommendation:
        """The first choice that fits, or what is missing."""
        slow = _slow_link(self.rows, self.situation)
        for stage in self.rows.stages_of("none"):
            if stage > 0 and self.situation.world == 1:
                self.say("With one rank there is nobody to shard with: stages 1 to 3 save nothing.")
                break
            if stage == 3 and slow:
                self.say(slow)
                found = self._offloaded([2])
                if found is not None:
                    return self._answer(found)
            found = self._at_stage(stage)
            if found is not None:
                return self._answer(found)
        found = self._offloaded(None)
        return self._answer(found) if found is not None else self._nothing_fits()

    def _at_stage(self, stage: int) -> Found | None:
        plain = self.rows.get(stage, "none", False)
        if plain is None:
            return self._lighter(stage, "none")
        if fits(plain.row, self.situation):
            self.say(_chosen(plain.row, self.situation))
            return plain
        blame = _blame(plain.row, self.situation)
        if blame is None:
            self.say(_states_too_large(plain.row, self.rows, self.situation))
            return None
        self.say(blame)
        found = self._lighter(stage, "none")
        if found is None:
            self.say(
                f"Not even micro-batch 1 with recomputation fits at stage {stage}, so its states must shrink as well."
                if stage < 3
                else "Not even micro-batch 1 with recomputation fits at stage 3."
            )
        return found

    def _lighter(self, stage: int, offload: str) -> Found | None:
        for found in self.rows.lighter(stage, offload):
            if fits(found.row, self.situation):
                self.say(_lightened(found, self.rows.micro_batch, self.situation))
                return found
        return None

    def _offloaded(self, stages: list[int] | None) -> Found | None:
        """The cheapest offload that fits, at stage 3 unless told otherwise; with one rank at the lowest stage."""
        for offload in OFFLOAD_ORDER:
            there = self.rows.stages_of(offload)
            if stages is not None:
                there = [stage for stage in there if stage in stages]
            elif self.situation.world > 1:
                there = there[::-1]
            for stage in there:
                plain = self.rows.get(stage, offload, False)
                if plain is not None and fits(plain.row, self.situation):
                    self.say(_offload_chosen(plain.row, self.situation))
                    return plain
                found = self._lighter(stage, offload)
                if found is not None:
                    self.say(_offload_chosen(found.row, self.situation))
                    return found
                if plain is not None and stages is None:
                    self._refused(offload, stage)
                    break
        return None

    def _refused(self, offload: str, stage: int) -> None:
        leanest = [f.row for f in self.rows.lighter(stage, offload)]
        plain = self.rows.get(stage, offload, False)
        rows = leanest + ([plain.row] if plain else [])
        device, host = min(short_of(row, self.situation) for row in rows)
        if device:
            self.say(f"Offload {offload} at stage {stage} is still {gib(device)} over the device's memory.")
        elif host:
            need = min(row.host_bytes for row in rows) * self.situation.here
            self.say(
                f"Offload {offload} would put {gib(need)} on each machine ({self.situation.here} ranks), "
                f"{gib(host)} more than its host memory."
            )

    def _answer(self, found: Found) -> Recommendation:
        return Recommendation(
            row=found.row,
            estimated=found.estimated,
            adapters=self.adapters,
            reasons=tuple(self.reasons),
            cautions=tuple(_cautions(found, self.rows, self.situation)),
        )

    def _nothing_fits(self) -> Recommendation:
        choices = [f.row for r in self.rows.all for f in self.rows.lighter(r.stage, r.offload)] + list(self.rows.all)
        short = [(short_of(row, self.situation), row) for row in choices]
        (device, host), leanest = min(short, key=lambda pair: (pair[0], pair[1].total))
        what = f"{gib(device)} of device memory" if device else f"{gib(host)} of host memory on each machine"
        self.say(
            f"Nothing fits: the leanest choice ({describe(leanest)}) peaks at {gib(leanest.total)} per rank against "
            f"{gib(self.situation.device_memory)}, and lacks {what}. Use more ranks, devices with more memory, "
            f"shorter sequences, or adapters instead of the whole model."
        )
        return Recommendation(
            row=None,
            adapters=self.adapters,
            reasons=tuple(self.reasons),
            missing_bytes=device,
            missing_host_bytes=host,
        )


def describe(row: Row) -> str:
    """``stage 2, recomputation, micro-batch 4`` for people."""
    parts = [f"stage {row.stage}"]
    if row.offload != "none":
        parts.append(f"offload {row.offload}")
    for stage in sorted({stage for _, stage in row.unit_stages}):
        lowered = [label for label, own in row.unit_stages if own == stage]
        parts.append(f"{units(lowered)} at stage {stage}")
    if row.checkpointing:
        parts.append(f"activations{f' of {units(row.recomputed_units)}' if row.recomputed_units else ''} recomputed")
    return ", ".join([*parts, f"micro-batch {row.micro_batch}"])


def units(labels: Sequence[str]) -> str:
    """``3 units ((root), blocks.5, blocks.4)`` for people; long lists are cut."""
    shown = ", ".join(labels[:3]) + (", ..." if len(labels) > 3 else "")
    return f"{len(labels)} unit{'s' if len(labels) != 1 else ''} ({shown})"


def _peak(row: Row, situation: Situation) -> str:
    free = situation.device_memory - row.total
    where = f" in {row.peak_phase}" if row.peak_phase and not situation.states_only else ""
    what = "keeps" if situation.states_only else "peaks at"
    return f"{what} {gib(row.total)}{where} of {gib(situation.device_memory)}, {gib(free)} free"


def _chosen(row: Row, situation: Situation) -> str:
    peak = _peak(row, situation)
    if row.stage == 0:
        return f"Plain data parallelism fits: stage 0 {peak}. Nothing needs to be sharded."
    ranks = situation.world
    why = {
        1: f"Masters and optimizer states, sharded over {ranks} ranks, cost no byte more on the wire than stage 0",
        2: f"Gradients sharded over {ranks} ranks as well keep whole parameters on every rank, so nothing is gathered "
        f"while computing",
        3: f"Parameters are sharded over {ranks} ranks as well and gathered unit by unit, in forward and in backward",
    }[row.stage]
    return f"Stage {row.stage} fits: {peak}. {why} ({gib(row.sent_bytes_per_step)} sent per rank and step)."


def _states_too_large(row: Row, rows: Rows, situation: Situation) -> str:
    over = gib(row.total - situation.device_memory)
    name = "Stage 0 (plain data parallelism)" if row.stage == 0 else f"Stage {row.stage}"
    head = f"{name} needs {gib(row.total)}, {over} more than the device has"
    if row.stage == 3:
        return f"{head}: {gib(states_of(row))} of it are this rank's share of the states."
    after = rows.get(row.stage + 1, "none", False) if situation.world > 1 else None
    what, now = {
        0: ("masters and optimizer states", row.master + row.optimizer),
        1: ("gradients", row.grads),
        2: ("parameters", row.params),
    }[row.stage]
    if after is None:
        return f"{head}: {what} are {gib(now)} of it."
    then = states_of(after.row)
    return (
        f"{head}: {what} are {gib(now)} of it, and sharding them over {situation.world} ranks (stage {row.stage + 1}) "
        f"brings the states from {gib(states_of(row))} to {gib(then)}."
    )


def _blame(row: Row, situation: Situation) -> str | None:
    """Why activations are the problem, if they are: a sentence, or None where states are."""
    states, batch = states_of(row), per_batch(row)
    if batch == 0:
        return None
    head = f"Stage {row.stage} needs {gib(row.total)} of {gib(situation.device_memory)}"
    share = f"activations and temporaries are {gib(batch)} of it, states {gib(states)}"
    states_fit = states + row.framework <= situation.device_memory
    if batch > states or (states_fit and batch + row.framework > situation.device_memory):
        cure = "so a higher stage is no cure" if row.stage < 3 else "so they must shrink before anything is moved away"
        return f"{head}: {share}. Every rank holds its own activations at every stage, {cure}."
    if row.stage == 2 and states_fit:
        return (
            f"{head}: {share}. Parameters and all other states fit, so they need no stage 3; activations must shrink."
        )
    if row.stage == 3:
        return f"{head}: {share}. The states cannot be sharded further, so activations shrink before anything is moved away."
    return None


def _lightened(found: Found, asked: int, situation: Situation) -> str:
    row = found.row
    about = "about " if found.estimated else ""
    peak = f"{about}{_peak(row, situation)}"
    steps = []
    if row.micro_batch != asked:
        steps.append(
            f"micro-batch {row.micro_batch} instead of {asked} (with {asked // row.micro_batch} times the accumulation "
            f"steps the global batch stays)"
        )
    if row.checkpointing:
        steps.append("recomputing activations in backward (about a third more computing)")
    return f"With {' and '.join(steps)} stage {row.stage} {peak}."


def _offload_chosen(row: Row, situation: Situation) -> str:
    away = []
    if row.host_bytes:
        away.append(f"{gib(row.host_bytes * situation.here)} in the host memory of each machine")
    if row.disk_bytes:
        away.append(f"{gib(row.disk_bytes)} on disk per rank")
    return (
        f"Offload {row.offload} at stage {row.stage} {_peak(row, situation)}; {' and '.join(away) or 'states'} cross the "
        f"host link in every step, so it comes after everything that keeps them on the device."
    )


def _slow_link(rows: Rows, situation: Situation) -> str:
    """A sentence when the link between ranks is too slow for stage 3, else ''."""
    if situation.bandwidth is None or situation.world == 1:
        return ""
    gbs = f"{situation.bandwidth / 1e9:.3g} GB/s"
    where = "On one machine with" if situation.one_machine else "With"
    found = rows.get(3, "none", False)
    if situation.speed is not None and situation.tokens and found is not None:
        time = step_time(found.row.sent_bytes_per_step, situation.parameters, situation.tokens, situation.speed)
        if time.hidden:
            return ""
        return (
            f"{where} {gbs} between ranks, stage 3 is avoided where possible: it would send "
            f"{gib(found.row.sent_bytes_per_step)} per rank and step ({time.communication_s:.2g} s) while {situation.tokens:,} "
            f"tokens compute for {time.compute_s:.2g} s; it is hidden from {time.tokens_to_hide:,} tokens on."
        )
    if situation.bandwidth > SLOW_LINK:
        return ""
    return (
        f"{where} {gbs} between ranks, stage 3 is avoided where possible: it gathers every parameter in forward and in "
        f"backward, half as much traffic again as stage 2."
    )


def _lora_sentence(whole: Rows, adapters: Rows, situation: Situation) -> str:
    before = whole.get(0, "none", False)
    after = adapters.get(0, "none", False)
    numbers = (
        f" (states of one rank at stage 0: {gib(states_of(after.row))} instead of {gib(states_of(before.row))})"
        if before is not None and after is not None
        else " (--trainable lora:r=16): frozen weights keep neither gradients nor masters nor optimizer states"
    )
    return (
        f"{situation.task_samples:,} samples are little to train {parameters(situation.trained or situation.parameters)} "
        f"parameters with: train LoRA adapters first{numbers}, and the whole model only if they fall short."
    )


def _cautions(found: Found, rows: Rows, situation: Situation) -> list[str]:
    row, cautions = found.row, []
    if found.estimated:
        cautions.append(
            f"This row is scaled from micro-batch {rows.micro_batch}: plan with micro-batch {row.micro_batch}."
        )
    free = situation.device_memory - row.total
    if situation.states_only:
        left = f", and {gib(free)} leave little" if free < _TIGHT * situation.device_memory else ""
        cautions.append(f"Only states are counted: activations, gathered units and buffers need room too{left}.")
    elif free < _TIGHT * situation.device_memory:
        cautions.append("The headroom is tight: an allocator that fragments needs a few percent.")
    if row.disk_bytes:
        cautions.append(f"Each machine must have {gib(row.disk_bytes * situation.here)} of disk free for it.")
    if row.host_bytes and situation.host_memory is None:
        cautions.append(f"Each machine must have {gib(row.host_bytes * situation.here)} of host memory free for it.")
    if row.stage == 3 and _slow_link(rows, situation):
        cautions.append("Only stage 3 fits, so its traffic will slow every step.")
    return cautions
