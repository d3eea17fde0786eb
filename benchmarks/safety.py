"""What safety costs: step time without headers, with ``checks: full`` and in reproducible mode, as ratios in one run.

    torchrun --nproc-per-node 2 benchmarks/safety.py [--model gpt:25m] [--stage 2] [--rounds 9]

Variants take turns, a step each; prints the median of the ratios to the ordinary engine's step of the same round and, in
brackets, the smallest and the largest. ``no headers`` takes the guard of the transport out: what is left of its time is
what announcing collectives costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import shardledger as sl
from shardledger.transport.guard import Guard, Notice
from shardledger.workload import load_model

SEQUENCES, TOKENS = 2, 128
VARIANTS: dict[str, dict[str, Any]] = {
    "ordinary": {},
    "no headers": {},
    "checks: full": {"checks": "full"},
    "reproducible": {"reproducible": True},
}


def engine_of(model: str, stage: int, own: dict[str, Any], *, bf16: bool = False) -> sl.Engine:
    """A fresh engine for one variant."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "shardledger": own,
    }
    return sl.initialize(model=load_model(model, TOKENS), config=config, device="cpu")[0]


@contextmanager
def without_headers() -> Iterator[None]:
    """Collectives start without being announced; tags come from a count alone."""
    announce, check = Guard.announce, Guard.check
    count = iter(range(1 << 20, 1 << 30))
    Guard.announce = lambda self, what, payload: (Notice(what, torch.empty(0)), next(count))  # type: ignore[method-assign]
    Guard.check = lambda self, notice: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Guard.announce, Guard.check = announce, check  # type: ignore[method-assign]


def step(engine: sl.Engine, source: torch.Generator) -> float:
    """Seconds of one training step on tokens of this rank."""
    tokens = torch.randint(0, 256, (SEQUENCES, TOKENS + 1), generator=source)
    start = time.perf_counter()
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt:25m")
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("WORLD_SIZE", "1"))))
    torch.distributed.init_process_group("gloo")
    engines = {name: engine_of(arguments.model, arguments.stage, own) for name, own in VARIANTS.items()}
    source = torch.Generator().manual_seed(torch.distributed.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(arguments.rounds + 2):
        for name, engine in engines.items():
            torch.distributed.barrier()
            with without_headers() if name == "no headers" else nullcontext():
                took = step(engine, source)
            if turn >= 2:  # the first rounds warm up
                seconds[name].append(took)
    if torch.distributed.get_rank() == 0:
        print(f"{arguments.model}, stage {arguments.stage}, {arguments.rounds} rounds, steps of ", end="")
        print(f"{statistics.median(seconds['ordinary']) * 1e3:.0f} ms")
        for name, taken in seconds.items():
            ratios = sorted(a / b for a, b in zip(taken, seconds["ordinary"], strict=True))
            print(f"{name:14} {statistics.median(ratios):.3f} [{ratios[0]:.3f} {ratios[-1]:.3f}]")
    for engine in engines.values():
        engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
