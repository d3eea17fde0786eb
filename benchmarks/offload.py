"""What offload costs and saves, each against its own yardstick in one interleaved run.

    python benchmarks/offload.py step            one rank: the step on the host, the step through the disk
    python benchmarks/offload.py memory          two ranks, 350 M parameters: resident memory against the ledger

``step`` compares the optimizer step of the engine, medians over interleaved rounds, with a bare fused AdamW over the same
tensors, and with threads that read and write the same bytes of a file past the page cache and do nothing else.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

import shardledger as sl
from shardledger.runtime.tile_step import TileStep
from shardledger.telemetry.memory import MemoryMeter
from shardledger.transport.disk import AlignedBuffer
from shardledger.workload import load_model, loss_of

CHUNK = 4 << 20
TOKENS = 64
THREADS = 4


def main() -> None:
    """Run one part and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("step", "memory", "rank"))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--millions", type=int, default=100, help="parameters of `step`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "memory":
        memory(options.folder)
    elif options.part == "rank":
        rank(options.folder, options.disk)
    else:
        step(options.folder, options.millions, options.rounds)


def step(folder: str, millions: int, rounds: int) -> None:
    """Bare AdamW, the engine's step on the host, raw disk, the engine's step through the disk; in turn."""
    layers = max(1, millions * 1_000_000 // 2048**2)
    on_host = _Stepped(layers, {"device": "cpu"})
    bare = _bare(layers)
    seconds: dict[str, list[float]] = {"bare": [], "host": [], "raw": [], "disk": []}
    on_disk = _Stepped(layers, {"device": "nvme", "nvme_path": folder})
    moved = on_disk.engine.tier_traffic()["disk"]
    with tempfile.TemporaryDirectory(dir=folder) as raw:
        for number in range(rounds + 1):
            found = {"bare": _timed(bare.step), "host": on_host.step()}
            found["disk"] = on_disk.step()
            now = on_disk.engine.tier_traffic()["disk"]
            nbytes = int(now["written_bytes"] - moved["written_bytes"])
            moved = now
            found["raw"] = _raw(Path(raw) / "raw.bin", nbytes)
            if number:  # the first one makes states and files
                for key, value in found.items():
                    seconds[key].append(value)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"{layers * 2048**2 / 1e6:.0f} M parameters, fp32, {torch.get_num_threads()} threads, {rounds} rounds")
    for key, value in medians.items():
        spread = f"{min(seconds[key]):.3f} to {max(seconds[key]):.3f}"
        print(f"  {key:5} {value:.3f} s ({spread})")
    print(f"  disk: {nbytes / 1e9:.2f} GB read and as many written a step")
    print(f"host step at {medians['bare'] / medians['host']:.0%} of a bare fused AdamW's speed")
    print(f"disk step at {medians['raw'] / medians['disk']:.0%} of raw direct reads and writes of the same bytes")


class _Stepped:
    """An engine whose optimizer step can be timed alone."""

    def __init__(self, layers: int, section: dict[str, Any]) -> None:
        model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(layers)))
        self.engine = sl.initialize(
            model=model,
            config={
                "train_micro_batch_size_per_gpu": 1,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                "zero_optimization": {"stage": 2, "offload_optimizer": section},
            },
        )[0]

    def step(self) -> float:
        """Seconds of the update of one step: without forward, backward and norm."""
        spent = []
        run = TileStep.run

        def timed(*args: Any) -> None:
            spent.append(_timed(lambda: run(*args)))

        self.engine.backward(self.engine(torch.randn(1, 2048)).square().mean())
        TileStep.run = timed  # type: ignore[method-assign]
        try:
            self.engine.step()
        finally:
            TileStep.run = run  # type: ignore[method-assign]
        return spent[0]


def _bare(layers: int) -> torch.optim.Optimizer:
    parameters = [torch.randn(2048 * 2048, requires_grad=True) for _ in range(layers)]
    for parameter in parameters:
        parameter.grad = torch.randn(2048 * 2048)
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _raw(path: Path, nbytes: int) -> float:
    """Seconds of reading and writing ``nbytes`` each by a few threads, as the engine does, and nothing else."""
    size = nbytes // CHUNK * CHUNK
    fresh = not path.exists()
    file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
    if fresh:
        os.posix_fallocate(file, 0, size)
        _sweep(file, size, write=True)
    spent = _timed(lambda: _sweep(file, size, write=None))
    os.close(file)
    return spent


def _sweep(file: int, size: int, write: bool | None) -> None:
    buffers = [AlignedBuffer(CHUNK) for _ in range(THREADS)]

    def move(thread: int) -> None:
        for offset in range(thread * CHUNK, size, THREADS * CHUNK):
            if not write:
                os.preadv(file, [buffers[thread].view], offset)
            if write is not False:
                os.pwritev(file, [buffers[thread].view], offset)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(move, range(THREADS)))


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def memory(folder: str) -> None:
    """Train 350 M parameters in fp32 on two ranks, with and without the disk; compare memory, losses and weights."""
    found = {}
    for home in ("disk", "memory"):
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29617"]
        command += [__file__, "rank", "--folder", folder, *(["--disk"] if home == "disk" else [])]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found[home] = json.loads(next(line for line in told.splitlines() if line.startswith("{")))
    choice = {"disk": "optimizer:nvme", "memory": "none"}
    plan = sl.plan("gpt:350m", _config({"stage": 2}), world_size=2, micro_batch=1, seq_len=TOKENS, device="cpu")
    for home, run in found.items():
        row = next(r for r in plan.rows if (r.stage, r.offload, r.checkpointing) == (2, choice[home], False))
        predicted = row.total + run["framework"]
        print(
            f"{home:6}: resident {run['total'] / 2**20:.0f} MiB a rank, predicted {predicted / 2**20:.0f} MiB "
            f"({run['total'] / predicted - 1:+.1%}), on disk {row.disk_bytes / 2**20:.0f} MiB; step "
            f"{run['step_s']:.1f} s, of it waiting for the disk {run['wait_s']:.2f} s"
        )
    same = [found["disk"][key] == found["memory"][key] for key in ("losses", "digest")]
    print(f"losses and weights equal to the last bit: {all(same)}")


def rank(folder: str, disk: bool) -> None:
    """One of the ranks of ``memory``."""
    zero: dict[str, Any] = {"stage": 2}
    if disk:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
    warm = sl.initialize(model=load_model("gpt:1m", TOKENS), config=_config({"stage": 2}))[0]
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    warm.backward(loss_of(warm(tokens, tokens)))
    warm.step()
    warm.destroy()
    del warm
    gc.collect()
    framework = psutil.Process().memory_info().rss  # with everything that torch loads when it is first used
    torch.manual_seed(0)
    engine = sl.initialize(model=load_model("gpt:350m", TOKENS), config=_config(zero))[0]
    generator = torch.Generator().manual_seed(engine.rank)
    losses, spent = [], 0.0
    waited = 0.0
    for _ in range(3):
        tokens = torch.randint(0, 256, (1, TOKENS + 1), generator=generator)
        begin, before = time.perf_counter(), engine.tier_traffic()["disk"]["wait_s"]
        loss = loss_of(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        spent, waited = time.perf_counter() - begin, engine.tier_traffic()["disk"]["wait_s"] - before
    total = MemoryMeter(engine.device).peak_bytes()
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy())
    if engine.rank == 0:
        told = {"total": total, "framework": framework, "losses": losses}
        print(json.dumps({**told, "digest": digest.hexdigest(), "step_s": spent, "wait_s": waited}), flush=True)
    engine.destroy()


def _config(zero: dict[str, Any]) -> dict[str, Any]:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-4}}
    return {"train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, "zero_optimization": zero}


if __name__ == "__main__":
    main()
