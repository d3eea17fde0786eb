"""One rank of one engine: starts it, then does what the conductor asks for over a pipe."""

from __future__ import annotations

import cProfile
import io
import logging
import os
import pstats
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
from side_by_side.cases import SEED, SHAPES, Case, Contender
from side_by_side.engines import trainer_class

TINY_TOKENS = 8
"""Of the step whose transient bytes are counted: so few that activations do not hide them."""


class Rank:
    """Answers requests of the conductor; ``answer`` is what it returns for each."""

    def __init__(self, case: Case, contender: Contender) -> None:
        self.rank = int(os.environ["RANK"])
        made = trainer_class(contender)
        self.meter = meters.meter_for(case.device)
        dist.init_process_group("nccl" if case.device == "cuda" else "gloo")
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(**SHAPES[case.model]))
        self.trainer = made(model, contender, case)
        data = TextData(read_corpus(), case.length)
        shape = BatchShape(micro=case.sequences, world=case.world)
        self.sampler = BatchSampler(data, shape, rank=self.rank, seed=SEED)
        self.losses: list[torch.Tensor] = []

    def answer(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Run one request."""
        found: dict[str, Any] = getattr(self, f"do_{name}")(*arguments)
        return found

    def do_first(self) -> dict[str, Any]:
        """The first step; ``at`` is the wall clock when it was done."""
        self._step()
        self.meter.finish()
        return {"at": time.time()}

    def do_turn(self, untimed: int, timed: int) -> dict[str, Any]:
        """Some steps to warm caches, then timed ones. The steps meet in collectives, so no barrier is needed."""
        for _ in range(untimed):
            self._step()
        self.meter.finish()
        counted = self.trainer.sent_bytes()
        wire = meters.loopback_bytes()
        begin, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
        for _ in range(timed):
            self._step()
        self.meter.finish()
        seconds = (time.perf_counter() - begin) / timed
        thread, process = time.thread_time() - thread, time.process_time() - process
        wire = meters.loopback_bytes() - wire
        now = self.trainer.sent_bytes()
        return {
            "seconds": seconds,
            "thread_cpu_s": thread / timed,
            "process_cpu_s": process / timed,
            "wire_bytes": wire / timed,
            "counted_bytes": None if now is None or counted is None else (now - counted) / timed,
        }

    def do_memory(self) -> dict[str, Any]:
        """Peak so far above what was there after the imports; then the transient bytes of one small step."""
        peak = self.meter.peak_bytes()
        tokens = torch.zeros(1, TINY_TOKENS, dtype=torch.int64).to(self.meter.device)
        self.trainer.step(tokens, tokens)
        transient = self.meter.most_allocated(lambda: self.trainer.step(tokens, tokens))
        return {"peak_bytes": peak, "transient_bytes": transient}

    def do_losses(self) -> dict[str, Any]:
        """Every loss so far."""
        return {"losses": [float(loss) for loss in self.losses]}

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

    def do_python(self, steps: int) -> dict[str, Any]:
        """CPU seconds of Python functions during some steps, the most expensive first."""
        profiler = cProfile.Profile(time.thread_time)  # of this thread alone: other programs do not count
        profiler.enable()
        for _ in range(steps):
            self._step()
        profiler.disable()
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(45)
        return {"text": text.getvalue()}

    def do_trace(self, steps: int, file: str) -> dict[str, Any]:
        """Chrome trace of some steps, of rank 0 in ``file``; its operators by own time as text."""
        with torch.profiler.profile() as profiler:
            for _ in range(steps):
                self._step()
        if self.rank == 0:
            profiler.export_chrome_trace(file)
        by = "self_cuda_time_total" if self.meter.device == "cuda" else "self_cpu_time_total"
        return {"text": profiler.key_averages().table(sort_by=by, row_limit=30)}

    def _step(self) -> None:
        ((tokens, targets),) = self.sampler.next_batch()
        device = self.meter.device
        self.losses.append(self.trainer.step(tokens.to(device), targets.to(device)))


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
