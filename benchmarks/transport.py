"""What shared memory gives: step time with payloads through gloo and out of the other ranks' memory, in one run.

    torchrun --nproc-per-node 2 benchmarks/transport.py [--model gpt:25m] [--stages 0 1 2 3] [--rounds 9]

Both take turns, a step each, the first of a round by turns; prints milliseconds a step, the median over rounds of gloo's
time by shared memory's (above 1: shared memory is faster) with the smallest and the largest, then rank 0's milliseconds of
processor time (all its threads) and of waiting in collectives. On a busy machine look at the processor's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
from safety import SEQUENCES, TOKENS, engine_of

import shardledger as sl

WIRES = ("gloo", "shared_memory")


def step(engine: sl.Engine, source: torch.Generator) -> tuple[float, float, float]:
    """Seconds of one training step on tokens of this rank, of the processor, and of waiting in collectives."""
    tokens = torch.randint(0, 256, (SEQUENCES, TOKENS + 1), generator=source)
    torch.distributed.barrier()
    start, busy, waited = time.perf_counter(), time.process_time(), engine.comm_wait_s
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()
    return time.perf_counter() - start, time.process_time() - busy, engine.comm_wait_s - waited


def compare(stage: int, arguments: argparse.Namespace) -> None:
    """Measure one stage and print its line."""
    engines = {wire: engine_of(arguments.model, stage, {"transport": wire}, bf16=arguments.bf16) for wire in WIRES}
    source = torch.Generator().manual_seed(torch.distributed.get_rank())
    taken: dict[str, list[tuple[float, float, float]]] = {wire: [] for wire in WIRES}
    for turn in range(arguments.rounds + 2):
        for wire in WIRES if turn % 2 else reversed(WIRES):
            seconds = step(engines[wire], source)
            if turn >= 2:  # the first rounds warm up
                taken[wire].append(seconds)
    for engine in engines.values():
        engine.destroy()
    if torch.distributed.get_rank() == 0:
        steps, busy, waits = ([[t[i] * 1e3 for t in taken[wire]] for wire in WIRES] for i in range(3))
        ratios = sorted(a / b for a, b in zip(*steps, strict=True))
        parts = (" ".join(f"{statistics.median(one):7.1f}" for one in pair) for pair in (steps, busy, waits))
        step_ms, busy_ms, wait_ms = parts
        print(
            f"stage {stage}: {step_ms} ms  {statistics.median(ratios):.3f} [{ratios[0]:.3f} {ratios[-1]:.3f}]", end="  "
        )
        print(f"processor {busy_ms} ms  waited {wait_ms} ms", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt:25m")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--bf16", action="store_true")
    arguments = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    torch.distributed.init_process_group("gloo")
    if torch.distributed.get_rank() == 0:
        print(f"{arguments.model}, {world} ranks, {'bf16' if arguments.bf16 else 'fp32'}: {' then '.join(WIRES)}")
    for stage in arguments.stages:
        compare(stage, arguments)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
