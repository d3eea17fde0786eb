"""One rank of one engine: starts it, then does what the conductor asks for over a pipe."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
import warnings
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch._dynamo  # every engine loads these sooner or later, by ways of its own: they belong to all base lines
import torch.distributed as dist
import torch.distributed.fsdp

from shardledger.workload import GPT, BatchSampler, BatchShape, GPTConfig, TextData, read_corpus
from side_by_side import meters
from side_by_side.cases import SEED, SEQUENCES, SHAPES, TOKENS, Case, Contender
from side_by_side.engines import trainer_class

TINY_TOKENS = 8
"""Of the step whose transient bytes are counted: so few that activations do not hide them."""


class Rank:
    """Answers requests of the conductor; ``answer`` is what it returns for each."""

    def __init__(self, case: Case, contender: Contender) -> None:
        self.rank = int(os.environ["RANK"])
        made = trainer_class(contender)
        meters.settle()
        self.base = meters.resident_bytes()
        meters.forget_peak()
        dist.init_process_group("gloo")
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(**SHAPES[case.model]))
        self.trainer = made(model, contender, case.precision)
        data = TextData(read_corpus(), TOKENS)
        self.sampler = BatchSampler(data, BatchShape(micro=SEQUENCES, world=case.world), rank=self.rank, seed=SEED)
        self.losses: list[float] = []
        self.started: float | None = None

    def answer(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Run one request."""
        found: dict[str, Any] = getattr(self, f"do_{name}")(*arguments)
        return found

    def do_first(self) -> dict[str, Any]:
        """The first step; ``at`` is the wall clock when it was done."""
        self._step()
        return {"at": time.time()}

    def do_turn(self, untimed: int, timed: int) -> dict[str, Any]:
        """Some steps to warm caches, then timed ones. The steps meet in collectives, so no barrier is needed."""
        for _ in range(untimed):
            self._step()
        counted = self.trainer.sent_bytes()
        wire = meters.loopback_bytes()
        begin = time.perf_counter()
        for _ in range(timed):
            self._step()
        seconds = (time.perf_counter() - begin) / timed
        wire = meters.loopback_bytes() - wire
        now = self.trainer.sent_bytes()
        return {
            "seconds": seconds,
            "wire_bytes": wire / timed,
            "counted_bytes": None if now is None or counted is None else (now - counted) / timed,
        }

    def do_memory(self) -> dict[str, Any]:
        """Peak resident set so far above that after the imports; then the transient bytes of one small step."""
        peak = meters.peak_resident_bytes() - self.base
        tokens = torch.zeros(1, TINY_TOKENS, dtype=torch.int64)
        self.trainer.step(tokens, tokens)
        transient = meters.most_allocated(lambda: self.trainer.step(tokens, tokens))
        return {"peak_bytes": peak, "transient_bytes": transient}

    def do_losses(self) -> dict[str, Any]:
        """Every loss so far."""
        return {"losses": self.losses}

    def do_save(self, folder: str) -> dict[str, Any]:
        """Save; seconds until the call returned."""
        begin = time.perf_counter()
        self.trainer.save(folder)
        return {"seconds": time.perf_counter() - begin}

    def do_load(self, folder: str) -> dict[str, Any]:
        """Load; seconds until the call returned."""
        begin = time.perf_counter()
        self.trainer.load(folder)
        return {"seconds": time.perf_counter() - begin}

    def do_profile(self, steps: int) -> dict[str, Any]:
        """Function times of Python during some steps: the most expensive by own time."""
        import cProfile
        import io
        import pstats

        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            self._step()
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(40)
        return {"text": text.getvalue()}

    def _step(self) -> None:
        ((tokens, targets),) = self.sampler.next_batch()
        self.losses.append(float(self.trainer.step(tokens, targets)))


def main() -> None:
    """Serve until the pipe closes."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pipe = Connection(int(sys.argv[1]))
    case, contender = pipe.recv()
    try:
        rank = Rank(case, contender)
        while True:
            pipe.send(("ok", rank.answer(*pipe.recv())))
    except EOFError:
        rank.trainer.close()
        dist.destroy_process_group()
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise


if __name__ == "__main__":
    main()
