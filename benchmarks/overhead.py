"""What the engine itself costs: CPU time of its step at one rank above a bare loop with the same optimizer.

    python benchmarks/overhead.py [--stages 0,1,2,3] [--rounds 30]

Bare loop and engine take turns in one process and one thread, a step each, on the same batches. Time inside the transport is
taken off, so what is left is neither model compute, nor collectives, nor the optimizer's kernel. Two models: one so small
that only Python counts, for microseconds per unit and phase (forward, backward, step), and one of 25 M parameters, whose
passes over memory count too, for the share of a step. CPU seconds of the thread, so other programs hardly matter.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import shardledger as sl
from shardledger.transport import Transport, Work
from shardledger.transport.wrapped import WrappedTransport
from shardledger.workload import GPT, GPTConfig

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
SMALL, LARGE = (
    GPTConfig(layers=8, heads=2, width=32, context=128),
    GPTConfig(layers=8, heads=8, width=512, context=1024),
)
PHASES = ("forward", "backward", "step")
Seconds = dict[str, float]


class TimedTransport(WrappedTransport):
    """Passes everything to ``inner`` and adds up the CPU seconds inside."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.spent = 0.0

    def timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call, on the clock."""
        begin = time.thread_time()
        try:
            return call(*arguments)
        finally:
            self.spent += time.thread_time() - begin

    def reduce_scatter(self, *arguments: Any) -> Work:
        """See ``Transport.reduce_scatter``."""
        return TimedWork(self.timed(self._inner.reduce_scatter, *arguments), self)

    def all_gather(self, *arguments: Any) -> Work:
        """See ``Transport.all_gather``."""
        return TimedWork(self.timed(self._inner.all_gather, *arguments), self)

    def exchange(self, *arguments: Any) -> torch.Tensor:
        """See ``Transport.exchange``."""
        return self.timed(self._inner.exchange, *arguments)  # type: ignore[no-any-return]


class TimedWork(Work):
    """A ``Work`` whose wait is on the clock."""

    def __init__(self, inner: Work, transport: TimedTransport) -> None:
        super().__init__(inner._counters, None)
        self._inner, self._transport = inner, transport

    @property
    def done(self) -> bool:
        """See ``Work.done``."""
        return self._inner.done

    def wait(self) -> None:
        """See ``Work.wait``."""
        self._transport.timed(self._inner.wait)


class Bare:
    """The loop without an engine."""

    def __init__(self, shape: GPTConfig) -> None:
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(self, batch: torch.Tensor) -> Seconds:
        """CPU seconds of one step's phases."""
        at = [time.thread_time()]
        loss = self.model(batch[:, :-1], batch[:, 1:])
        at.append(time.thread_time())
        loss.backward()
        at.append(time.thread_time())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        at.append(time.thread_time())
        return {phase: end - begin for phase, begin, end in zip(PHASES, at, at[1:], strict=False)}


class Ours:
    """The same loop with the engine."""

    def __init__(self, shape: GPTConfig, stage: int) -> None:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": [0.9, 0.999]}},
        }
        self.engine = sl.initialize(model=GPT(shape), config=config, device="cpu")[0]
        parts = self.engine._live()
        self.units = len(parts.units)
        self.transport = TimedTransport(parts.transport)
        parts.transport = parts.executor._transport = self.engine._stepper._transport = self.transport

    def step(self, batch: torch.Tensor) -> Seconds:
        """CPU seconds of one step's phases outside the transport."""
        at, inside = [time.thread_time()], [self.transport.spent]

        def lap() -> None:
            at.append(time.thread_time())
            inside.append(self.transport.spent)

        loss = self.engine(batch[:, :-1], batch[:, 1:])
        lap()
        self.engine.backward(loss)
        lap()
        self.engine.step()
        lap()
        laps = zip(PHASES, at, at[1:], inside, inside[1:], strict=False)
        return {phase: end - begin - (after - before) for phase, begin, end, before, after in laps}


def measure(shape: GPTConfig, stage: int, rounds: int) -> tuple[int, dict[str, tuple[float, float]]]:
    """Units, and by phase (and ``"all"``) the bare seconds and the engine's above them.

    Each is the lower decile over rounds: what other programs do to caches only adds.
    """
    bare, ours = Bare(shape), Ours(shape, stage)
    source = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(rounds + 3):
        batch = torch.randint(0, 256, (2, 129), generator=source)
        pairs.append((bare.step(batch), ours.step(batch)))
    found = {}
    for phase in (*PHASES, "all"):
        names = PHASES if phase == "all" else (phase,)
        low = [
            statistics.quantiles([sum(pair[whose][name] for name in names) for pair in pairs[3:]], n=10)[0]
            for whose in (0, 1)
        ]
        found[phase] = (low[0], low[1] - low[0])
    ours.engine.destroy()
    return ours.units, found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stages", default="0,1,2,3")
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| stage | units | forward | backward | step | us per unit and phase | at 25 M parameters, ms | share of a step |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for stage in map(int, asked.stages.split(",")):
        units, small = measure(SMALL, stage, asked.rounds * 4)
        each = [small[phase][1] / units * 1e6 for phase in PHASES]
        _, large = measure(LARGE, stage, asked.rounds)
        base, above = large["all"]
        cells = [f"{large[phase][1] * 1e3:.1f}" for phase in PHASES]
        print(
            f"| {stage} | {units} | {' | '.join(f'{us:.0f} us' for us in each)} | {sum(each) / len(PHASES):.1f} "
            f"| {above * 1e3:.1f} ({' + '.join(cells)}) of {base * 1e3:.0f} | {above / (base + above):.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
