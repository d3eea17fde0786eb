"""``plan --verify``: a few real steps on ranks of this machine, every live byte counted, beside what was predicted.

The count is exact and slow (``telemetry.live``), so this is a command of its own and no part of a training run.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardledger
from shardledger.cli.ranks import LAUNCHED_BY, rank_of
from shardledger.errors import ConfigError

if TYPE_CHECKING:
    from shardledger.config import Config
    from shardledger.forecast import Question
    from shardledger.telemetry.live import Reading

STEPS = 3
"""Optimizer steps: the first two make the states and learn the order, the third shows that no more comes."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """One row of a plan, run for real on ``world`` ranks of this machine (not the plan's own number of ranks)."""

    model: str
    config: dict[str, Any] | None
    """The configuration as a dict; None: the plan's default."""
    world: int
    stage: int
    checkpointing: bool
    micro_batch: int
    seq_len: int
    trainable: str = "all"
    steps: int = STEPS
    by_unit: dict[str, Any] | None = None
    """Keys of ``shardledger`` that tell units apart."""


@dataclass(frozen=True)
class RankResult:
    """One rank's highest moment, as predicted and as measured: bytes by category, and where it was."""

    predicted: dict[str, int]
    measured: dict[str, int]
    predicted_at: str
    measured_at: str

    @property
    def error(self) -> float:
        """Of the total, as a share of the measured one."""
        return self.predicted["total"] / self.measured["total"] - 1


def print_verification(wanted: Verification, results: Sequence[RankResult]) -> None:
    """The table of the worst rank, and the error of all."""
    from shardledger.cli.ledger import print_comparison

    what = f"stage {wanted.stage}{', recomputation' if wanted.checkpointing else ''}, micro-batch {wanted.micro_batch}"
    title = f"{wanted.steps} real steps of {wanted.model} on {wanted.world} rank(s), {what}: live bytes at the peak"
    print_comparison([{"predicted": r.predicted, "measured": r.measured} for r in results], title=title)
    print(f"peak predicted in {results[0].predicted_at}, measured in {results[0].measured_at}")


def verify(wanted: Verification) -> list[RankResult]:
    """Run, count and predict; results by rank.

    Raises:
        ConfigError: the model or the configuration is wrong.
        RunFailure: a rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="shardledger-") as folder:
        file = Path(folder) / "verification.json"
        file.write_text(json.dumps(asdict(wanted)), encoding="utf-8")
        if wanted.world == 1:
            verify_rank(file)
        else:
            from shardledger.cli.launch import launch

            os.environ.pop("SLURM_PROCID", None)
            launch(["ledger", "--verification", str(file)], wanted.world)
        return [RankResult(**rank) for rank in json.loads(_result_of(file).read_text(encoding="utf-8"))]


def verify_rank(file: Path) -> None:
    """What every rank does; rank 0 leaves the results of all beside ``file``."""
    if rank_of(os.environ) is not None and LAUNCHED_BY in os.environ:
        from shardledger.cli.guard import guard_rank

        guard_rank()
    from shardledger.forecast import Question, base_config, variant

    wanted = Verification(**json.loads(file.read_text(encoding="utf-8")))
    question = Question(
        model=wanted.model,
        config=wanted.config,
        world=wanted.world,
        seq_len=wanted.seq_len,
        trainable=wanted.trainable,
        device="cpu",
        rank=rank_of(os.environ) or 0,
    )
    config = variant(
        base_config(question), wanted.world, wanted.stage, wanted.checkpointing, wanted.micro_batch, wanted.by_unit
    )
    measured, engine = measure(question, config, wanted.steps)
    predicted = predict(question, config)
    sides = [_numbers(predicted), _numbers(measured)]
    rows = engine.gather_scalars([number for side in sides for number in side])
    engine.destroy()
    if question.rank == 0:
        _result_of(file).write_text(json.dumps([_rank_result(row) for row in rows]), encoding="utf-8")


def measure(question: Question, config: Config, steps: int) -> tuple[Reading, Any]:
    """Train on this rank and count: the highest reading, and the engine. Collective.

    Raises:
        ConfigError: the model cannot be built.
    """
    import torch

    from shardledger.forecast import make_batch, model_maker
    from shardledger.runtime.observe import Observer
    from shardledger.telemetry.live import LiveBytes
    from shardledger.workload import loss_of

    torch.manual_seed(0)
    made = question.model if isinstance(question.model, torch.nn.Module) else model_maker(question)()
    gc.collect()  # what others left behind must not end inside the count
    meter = LiveBytes()
    meter.assign("params", (*made.parameters(), *made.buffers()))
    observer = Observer(meter)
    with meter:
        engine, *_ = shardledger.initialize(model=made, config=config.to_dict(), device="cpu")
        observer.attach(engine)
        for _ in range(steps * config.gradient_accumulation_steps):
            observer.micro_batch(lambda: make_batch(question, config.train_micro_batch_size_per_gpu), loss_of)
    observer.detach()
    if not engine.was_step_applied():
        raise ConfigError("the verification's steps were skipped: gradients of its blank batches are not finite.")
    return observer.peaks.highest, engine


def predict(question: Question, config: Config) -> Reading:
    """The highest reading of a dry run of the same."""
    from shardledger.forecast import describe_model, model_maker, rehearse

    make_model = model_maker(question)
    return rehearse(question, config, describe_model(make_model), make_model).run.highest


def _numbers(reading: Reading) -> list[float]:
    from shardledger.ledger import CATEGORIES
    from shardledger.telemetry.live import PHASES

    return [
        *(float(reading.by_category[c]) for c in CATEGORIES),
        float(reading.total),
        float(PHASES.index(reading.phase)),
    ]


def _rank_result(row: Sequence[float]) -> Mapping[str, Any]:
    from shardledger.ledger import CATEGORIES
    from shardledger.telemetry.live import PHASES

    half = len(row) // 2
    sides = [dict(zip((*CATEGORIES, "total"), map(int, part), strict=False)) for part in (row[:half], row[half:])]
    return {
        "predicted": sides[0],
        "measured": sides[1],
        "predicted_at": PHASES[int(row[half - 1])],
        "measured_at": PHASES[int(row[-1])],
    }


def _result_of(file: Path) -> Path:
    return file.with_name("result.json")
