"""``shardledger check``: the engine on every rank against one plain PyTorch process, in lockstep.

Rank 0 runs the reference beside its part of the engine. It needs memory for the whole model twice more (weights and
optimizer, of two references), and the time that one process would. The other ranks meet it before each of its
micro-batches, so that none waits long enough to be taken for lost.

Before each micro-batch, in every run, the global random generators (Python, NumPy if loaded, torch) are seeded with (seed,
step, micro-batch, rank). Dropout that draws from them is therefore the same on a rank and in the reference. A generator of
the model's own is not, and that is found: on ranks every process draws from its beginning, in one process each micro-batch
draws further on.

Buffers, such as the running statistics of a batch norm, follow the micro-batches of their own rank; state_dict() and
checkpoints hold rank 0's. Those are compared with the buffers of a reference that keeps one set per rank. Where the ranks'
sets have become different, one more loss decides at the end: if it depends on which rank's buffers it finds, ranks train
different models, and that is a difference. (The training loss of a batch norm does not depend on its running statistics.)
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardledger
from shardledger.cli.check_report import Comparison, Report
from shardledger.cli.decide import decided_config
from shardledger.cli.differences import Difference, Judge, State
from shardledger.cli.exits import FAILED
from shardledger.cli.ranks import LAUNCHED_BY, rank_of
from shardledger.cli.settings import Options, RunSettings, train_settings
from shardledger.cli.start import check_arguments, choose_device
from shardledger.workload import BatchSampler, BatchShape, TextData, load_model, loss_of, read_corpus
from shardledger.workload.one_process import Arithmetic, Makers, OneProcess, adopt, equal_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

RESULT = "SHARDLEDGER_CHECK_RESULT"  # the file in which rank 0 leaves its verdict for our own launcher
EQUAL, DIFFERENT = "equal", "different"
DEFAULT_RANKS = 2


def check_settings(options: Options, *, config: str, model: str, seq_len: int) -> RunSettings:
    """As for ``train``, on two ranks when nothing else is said. Raises ConfigError with every problem of the config."""
    if options.nproc is None and rank_of(os.environ) is None:
        options = replace(options, nproc=DEFAULT_RANKS)
    return replace(train_settings(options, config=config, model=model, seq_len=seq_len, eval_every=0), name="check")


def start_check(settings: RunSettings, tolerance: float | None, arguments: Sequence[str]) -> None:
    """Check in this process, or in ``settings.world`` ranks started with ``arguments``; ends the process when different.

    Raises:
        UsageFailure, ConfigError: something is wrong with the arguments; nothing was started.
        RunFailure: a rank failed.
        SystemExit: with code 1: the runs differ.
    """
    rank = rank_of(os.environ)
    if LAUNCHED_BY not in os.environ:
        check_arguments(settings)
    device = choose_device(settings)
    if rank is None:
        os.environ.pop("SLURM_PROCID", None)  # a batch script's: nothing further down may take it for a rank
    if rank is None and settings.world > 1:
        from shardledger.cli.launch import launch

        with tempfile.TemporaryDirectory(prefix="shardledger-") as folder:
            result = Path(folder) / "result"
            launch(arguments, settings.world, {RESULT: str(result)})
            equal = result.read_text(encoding="utf-8") == EQUAL
    else:
        if rank is not None:
            from shardledger.cli.guard import guard_rank

            guard_rank()
        equal = check(settings, tolerance, device)
        if LAUNCHED_BY in os.environ and RESULT in os.environ:
            # A rank that ends with an error is reported as one that failed, and none has.
            if rank == 0:
                Path(os.environ[RESULT]).write_text(EQUAL if equal else DIFFERENT, encoding="utf-8")
            return
    if not equal:
        sys.exit(FAILED)


def check(settings: RunSettings, tolerance: float | None, device: str) -> bool:
    """Run both sides and print the comparison on rank 0. Every rank calls this; True on every rank when all is equal.

    Raises:
        ShardledgerError: whatever the engine, the model or the data complain about.
    """
    options = settings.options
    text = TextData(read_corpus(options.data), settings.seq_len)
    config = decided_config(settings, device)
    engine, *_ = shardledger.initialize(model=_build(settings), config=config, device=device)
    shape = BatchShape(
        micro=engine.config.train_micro_batch_size_per_gpu,
        accumulation=engine.config.gradient_accumulation_steps,
        world=engine.world,
    )
    samplers = [BatchSampler(text, shape, rank=rank, seed=options.seed) for rank in range(engine.world)]
    initial = engine.state_dict()
    bench = Bench(settings, tolerance, engine, initial, text.corpus.source) if engine.rank == 0 else None
    different = _any(engine, bench is not None and bench.start(initial))
    step = 0
    while step < options.steps and not different:
        step += 1
        batches = [sampler.batch_of(step - 1) for sampler in samplers]
        losses = engine.gather_scalars(_train(engine, batches[engine.rank], (options.seed, step)))
        norm, state = engine.get_global_grad_norm(), engine.state_dict()
        if bench is not None:
            different = bench.compare(step, batches, Comparison(losses=losses, grad_norm=norm, state=state))
        else:
            for _ in range(shape.accumulation * shape.world * _references(tolerance)):
                _meet(engine)
        different = _any(engine, different)
    equal = not _any(engine, bench is not None and bench.finish(step, batches if step else []))
    engine.destroy()
    return equal


class Bench:
    """Rank 0's side: the references, the judge and the report."""

    def __init__(
        self, settings: RunSettings, tolerance: float | None, engine: Any, initial: State, source: str
    ) -> None:
        self._engine = engine
        self._seed = settings.options.seed
        self._report = Report(settings, engine, source)
        modules = [_build(settings) for _ in range(_references(tolerance))]
        if any(weight.is_meta for weight in modules[0].parameters()):
            for module in modules:
                adopt(module, initial)
        elif not equal_tensors(modules[0], modules[-1]):
            self._report.note(
                f"{settings.model} gives other weights each time it is called with the same seed; the reference takes over "
                f"the engine's"
            )
            for module in modules:
                adopt(module, initial)
        self._references = [
            OneProcess(module, _arithmetic(engine), _makers(engine), engine.device, _jitter(number, self._seed))
            for number, module in enumerate(modules)
        ]
        first = self._references[0]
        sixteen_bit = engine.config.precision != "fp32" or _arithmetic(engine).autocast is not None
        self._judge = Judge(first.state(), first.kinds(), sixteen_bit=sixteen_bit, tolerance=tolerance)

    def start(self, engine: State) -> bool:
        """Compare what both sides start from; True when that is different already."""
        self._report.header()
        return self._found(*self._judge.initial(engine, self._references[0].state()))

    def compare(self, step: int, batches: Sequence[Sequence[tuple[torch.Tensor, ...]]], engine: Comparison) -> bool:
        """Take the same step in the references and report it; True when something differs."""

        def before(rank: int, micro_batch: int) -> None:
            _meet(self._engine)
            seed_generators(self._seed, step, micro_batch, rank)

        results = [run.step(batches, before) for run in self._references]
        states = [run.state() for run in self._references]
        mine, noisy = results[0], results[1] if len(results) > 1 else None
        loss = self._judge.losses(step, engine.losses, mine.losses, noisy.losses if noisy else None)
        norm = self._judge.norm(step, engine.grad_norm, mine.grad_norm, noisy.grad_norm if noisy else None)
        tensors = self._judge.tensors(step, engine.state, states[0], states[1] if noisy else None)
        self._report.step(step, engine, mine, tensors)
        return self._found(*(found for found in (loss, norm, tensors.first) if found is not None))

    def finish(self, steps: int, batches: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> bool:
        """What can be asked only when nothing follows, and the last sentence; True when something differs after all."""
        if not self._report.different and batches:
            self._found(*self._drift(steps, batches))
            ratio = self._references[0].loss_of_two(batches)
            if ratio is not None and not 1 - self._judge.most < ratio < 1 + self._judge.most:
                self._report.note(
                    f"two micro-batches taken as one have {ratio:.4g} times the mean of their losses: the loss is not a "
                    f"mean over samples. Micro-batches and ranks are averaged, here and in one process alike, so what is "
                    f"learned depends on their number."
                )
        if self._judge.loss_noise > self._judge.most:
            self._report.note(
                f"the model does not repeat itself: two plain runs in one process, one rounding apart, have losses that "
                f"differ by {self._judge.loss_noise:.1%}. No comparison can be close; look for kernels that do not repeat "
                f"themselves, and for random numbers that no global seed decides."
            )
        self._report.last_sentence(steps)
        return self._report.different

    def _drift(self, step: int, batches: Sequence[Sequence[tuple[torch.Tensor, ...]]]) -> list[Difference]:
        """Buffers that differ between ranks, when the loss depends on them; a note when it does not."""
        run = self._references[0]
        names = run.split_buffers()
        for rank in range(1, len(batches) if names else 0):
            losses = []
            for whose in (rank, 0):
                seed_generators(self._seed, step, 0, rank)
                losses.append(run.loss_with_buffers(whose, batches[rank][0]))
            found = self._judge.drift(step, rank, names[0], losses)
            if found is not None:
                return [found]
        if names:
            self._report.note(
                f"buffers differ between ranks, each following its own micro-batches: {', '.join(names[:4])}"
                f"{', …' if len(names) > 4 else ''}. The loss does not depend on them in training; state_dict() and "
                f"checkpoints hold rank 0's."
            )
        return []

    def _found(self, *found: Difference) -> bool:
        if found:
            self._report.differs(found)
        return bool(found)


def seed_generators(*words: int) -> None:
    """Seed every global random generator with a mix of ``words``."""
    import torch

    digest = hashlib.blake2b(" ".join(map(str, words)).encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.manual_seed(number)  # of every device
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)


def _build(settings: RunSettings) -> nn.Module:
    seed_generators(settings.options.seed)
    return load_model(settings.model, settings.seq_len)


def _train(engine: Any, batches: Sequence[tuple[torch.Tensor, ...]], words: tuple[int, int]) -> list[float]:
    """One step of the engine on this rank; its losses by micro-batch."""
    losses = []
    for number, batch in enumerate(batches):
        seed_generators(*words, number, engine.rank)
        loss = loss_of(engine(*(part.to(engine.device) for part in batch)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def _references(tolerance: float | None) -> int:
    """A second one measures rounding; a tolerance that was given needs no measuring."""
    return 2 if tolerance is None else 1


def _meet(engine: Any) -> None:
    """All ranks: a collective without content, so that no rank waits for rank 0 longer than one micro-batch takes."""
    engine.gather_scalars([0.0])


def _any(engine: Any, found: bool) -> bool:
    """What rank 0 has found, on every rank."""
    return bool(engine.gather_scalars([float(found)])[0][0])


def _jitter(number: int, seed: int) -> torch.Generator | None:
    import torch

    return torch.Generator().manual_seed(seed + number) if number else None


def _arithmetic(engine: Any) -> Arithmetic:
    """How this engine rounds and in which order it adds."""
    from shardledger.plan.roles import Role
    from shardledger.runtime.describe import dtype_of

    plan = engine.plan
    wire, accumulate = dtype_of(plan.precision.wire), dtype_of(plan.precision.accumulate)
    return Arithmetic(
        compute=dtype_of(plan.precision.compute),
        accumulate=accumulate,
        local_accumulate=dtype_of(plan.precision.local_accumulate),
        wire=wire,
        rounding=accumulate if engine.device.type == "cpu" else wire,  # NCCL adds what travels
        autocast=dtype_of(plan.precision.autocast) if plan.precision.autocast else None,
        every_micro_batch=plan.is_sharded(Role.GRAD) or plan.reproducible,
        micro_batch_tree=plan.reproducible,
        average=plan.communication.average,
        clip_norm=plan.step.clip_norm,
        norm_order=float("inf") if plan.step.norm == "inf" else 2.0,
        world=plan.world,
        accumulation=plan.step.accumulation,
    )


def _makers(engine: Any) -> Makers:
    """Optimizer and schedule as the config resolves them, and a loss scale of its own."""
    import torch

    from shardledger.runtime.loss_scale import LossScaler
    from shardledger.runtime.schedulers import build_scheduler

    name, options = engine.config.optimizer.resolved()
    # torch has several kernels for one optimizer, which round differently: take the one that the engine runs on.
    kernel = {key: engine.optimizer.defaults[key] for key in ("fused", "foreach") if key in engine.optimizer.defaults}
    schedule, rule = engine.config.scheduler, engine.plan.precision.loss_scale
    return Makers(
        optimizer=lambda weights: getattr(torch.optim, name)(weights, **{**kernel, **options}),
        scheduler=(lambda optimizer: build_scheduler(*schedule.resolved(), optimizer)) if schedule else None,
        scaler=LossScaler(rule) if rule else None,
    )
