"""What ``shardledger check`` prints: one line a step, and at the end one sentence and, if need be, where to look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardledger.cli.differences import Difference, Losses, State, TensorVerdict
from shardledger.cli.settings import RunSettings
from shardledger.workload.one_process import StepResult


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The engine's side of one step."""

    losses: Losses
    grad_norm: float
    state: State


PLACES = {
    "loss": "The forward pass differs before any gradient does.",
    "gradient norm": "Every loss was equal: the backward pass or the sum over ranks and micro-batches differs.",
    "weight": "Losses and gradient norm were equal: the optimizer step, or a gradient too small to show in the norm, differs.",
    "buffer": "Losses, gradient norm and weights were equal.",
    "frozen weight": "Nothing should have changed it.",
    "drift": "The ranks hold different models, of which state_dict() and checkpoints show rank 0's.",
}

OWN_GENERATOR = (
    "a random generator of the model's own (torch.Generator, numpy.random.Generator): every rank draws the same dropout "
    "masks from it; use torch's global generator, or seed it with the rank"
)
STATE = (
    "state that the model keeps between calls (a counter, a cache, a moving average, statistics over the batch as a batch "
    "norm has them): a rank sees only its own micro-batches"
)
KERNELS = "kernels that do not repeat themselves (torch.use_deterministic_algorithms(True) names them)"
BRANCHES = "branches that depend on data, or on the rank: rounding, or another rank's batch, may take the other one"
SUMS = "a loss that is a sum or is divided by a count of its own: ranks and micro-batches are averaged"
BEHIND = "weights or gradients changed behind the engine's back (.data, gradient hooks that look at p.grad, a second optimizer)"

CAUSES = {
    "loss": (OWN_GENERATOR, STATE, BRANCHES, KERNELS, SUMS),
    "gradient norm": (BEHIND, OWN_GENERATOR + "; recomputed activations draw from it again", BRANCHES, KERNELS, SUMS),
    "weight": (BEHIND, BRANCHES, KERNELS, STATE),
    "buffer": (STATE, OWN_GENERATOR, KERNELS),
    "frozen weight": (BEHIND,),
    "drift": (STATE + "; keep the ranks' buffers equal yourself, for example by an all-reduce",),
}


class Report:
    """Prints as the check goes on."""

    def __init__(self, settings: RunSettings, engine: Any, source: str) -> None:
        self.different = False
        """Whether a difference was reported."""
        self._settings = settings
        self._engine = engine
        self._source = source
        self._found: tuple[Difference, ...] = ()
        self._notes = [*settings.notes]
        self._largest = (0.0, "", 0)  # size, name, step

    def header(self) -> None:
        """What is compared with what, and the head of the table."""
        config, engine = self._engine.config, self._engine
        lines = [
            f"check {self._settings.model}: {self._engine_words()} against one process of plain PyTorch",
            f"batch: {config.train_batch_size} sequences of {self._settings.seq_len} bytes of {self._source} "
            f"({config.train_micro_batch_size_per_gpu} x accumulation {config.gradient_accumulation_steps} "
            f"x {engine.world} ranks)",
            *(f"warning: {line}" for line in config.warnings),
            f"{'step':>5}{'loss':>12}{'difference':>12}{'grad norm':>12}{'difference':>12}  largest difference of a tensor",
        ]
        print("\n".join(lines), flush=True)

    def step(self, step: int, engine: Comparison, reference: StepResult, tensors: TensorVerdict) -> None:
        """One line of the table: the mean loss of the global batch, the norm, the tensor furthest away."""
        ours, its = ([value for row in losses for value in row] for losses in (engine.losses, reference.losses))
        loss_gap = max(abs(a - b) for a, b in zip(ours, its, strict=True))
        norm_gap = abs(engine.grad_norm - reference.grad_norm)
        if not tensors.largest <= self._largest[0]:
            self._largest = (tensors.largest, tensors.largest_name, step)
        where = f"{_short(tensors.largest)}  {tensors.largest_name}" if tensors.largest_name else "0"
        print(
            f"{step:>5}{sum(ours) / len(ours):>12.6f}{_short(loss_gap):>12}{engine.grad_norm:>12.5g}"
            f"{_short(norm_gap):>12}  {where}",
            flush=True,
        )

    def note(self, line: str) -> None:
        """Something to know that is no difference; printed at the end."""
        self._notes.append(line)

    def differs(self, found: Sequence[Difference]) -> None:
        """Keep the differences of the first step that has any, the earliest in the step first."""
        self.different = True
        self._found = tuple(found)

    def last_sentence(self, steps: int) -> None:
        """Notes, and the verdict."""
        for line in self._notes:
            print(f"note: {line}")
        if self._found:
            print(explain(self._found, self._engine))
        else:
            size, name, step = self._largest
            how = (
                f"the largest difference is {_short(size)}, in {name} after step {step}: rounding"
                if name
                else "every tensor bit for bit"
            )
            plural = "step" if steps == 1 else "steps"
            print(f"equal: {steps} {plural} of {self._engine_words()} agree with one process; {how}.")

    def _engine_words(self) -> str:
        engine = self._engine
        ranks = f"{engine.world} rank{'' if engine.world == 1 else 's'}"
        return f"{ranks}, stage {engine.zero_optimization_stage()}, {engine.config.precision}, {engine.device.type}"


def explain(found: Sequence[Difference], engine: Any) -> str:
    """Several lines: the first difference, the first tensor that differs after the same step, and what causes such."""
    first = found[0]
    lines = [f"different: {_when(first)}{_sentence(first, engine)}"]
    tensor = next((one for one in found[1:] if one.name), None)
    if tensor is not None:
        lines.append(f"  The first tensor that differs after that step: {_sentence(tensor, engine)}")
    lines.append(f"  {PLACES[first.kind]}" if first.step else "  Both sides were built with the same seed.")
    lines.append("  Usual causes:")
    lines += [f"    - {cause}" for cause in CAUSES[first.kind]]
    return "\n".join(lines)


def _when(one: Difference) -> str:
    return f"step {one.step}, " if one.step else "before the first step, "


def _sentence(one: Difference, engine: Any) -> str:
    ours, its = f"{one.engine:.8g}", f"{one.reference:.8g}"
    gap = f"(difference {_short(one.size)}, allowed {_short(one.allowed)})"
    if one.kind == "loss":
        number = f"{(one.micro_batch or 0) + 1} of {engine.plan.step.accumulation}"
        return f"rank {one.rank}, micro-batch {number}: the loss is {ours} on the rank and {its} in one process {gap}."
    if one.kind == "gradient norm":
        return f"all ranks: the gradient norm is {ours} with the engine and {its} in one process {gap}."
    if one.kind == "drift":
        which = f"buffer {one.name} is no longer the same on all ranks, and the loss depends on it"
        return f"rank {one.rank}: {which}: {ours} with this rank's buffers and {its} with those of rank 0 {gap}."
    if one.element is None:
        return (
            f"{one.kind} {one.name}: the root mean square of the difference is {_short(one.size)}, allowed "
            f"{_short(one.allowed)} (that of the tensor is {its} in one process)."
        )
    place = f" at {list(one.element)}" if one.element else ""
    here = f"{ours} with the engine{_owner(one, engine)}"
    return f"{one.kind} {one.name}{place}: {here} and {its} in one process {gap}."


def _owner(one: Difference, engine: Any) -> str:
    """Which rank's optimizer updates the element."""
    from shardledger.errors import LayoutError
    from shardledger.plan.roles import Role

    if one.kind != "weight" or not engine.plan.is_sharded(Role.OPTIM):
        return ""
    try:
        shape = next(slot.shape for slot in engine.layout.flat_of(one.name).slots if slot.name == one.name)
    except LayoutError:  # another name of a tied weight
        return ""
    index = 0
    for size, place in zip(shape, one.element or (), strict=True):
        index = index * size + place
    for rank in range(engine.world):
        for piece in engine.layout.pieces(one.name, rank):
            if piece.in_parameter.start <= index < piece.in_parameter.stop:
                return f" (updated on rank {rank})"
    return ""


def _short(number: float) -> str:
    return "0" if number == 0 else f"{number:.2g}"
