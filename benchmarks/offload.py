"""What offload costs and saves, each against its own yardstick in one interleaved run.

    python benchmarks/offload.py step            one rank: the step on the host, the step through the disk
    python benchmarks/offload.py memory          two ranks, 350 M parameters: resident memory against the ledger

``step`` compares the optimizer step of the engine, medians over interleaved rounds, with a bare fused AdamW over the same
tensors, and with threads that read and write the same bytes of a file past the page cache and do nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardledger as sl
from shardledger.runtime.tile_step import TileStep
from shardledger.transport.disk import AlignedBuffer

CHUNK = 4 << 20
THREADS = 4


def main() -> None:
    """Run one part and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("step", "memory"))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--millions", type=int, default=100, help="parameters of `step`")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.part == "memory":
        memory(options.folder)
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
    import subprocess
    import sys

    found = {}
    for home in ("disk", "memory"):
        zero: dict[str, Any] = {"stage": 2}
        if home == "disk":
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": folder}
        with tempfile.TemporaryDirectory(dir=folder) as place:
            config = Path(place) / "config.json"
            config.write_text(
                json.dumps(
                    {
                        "train_micro_batch_size_per_gpu": 1,
                        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
                        "zero_optimization": zero,
                    }
                )
            )
            out = Path(place) / "run"
            command = [sys.executable, "-m", "shardledger", "train", "--config", str(config), "--model", "gpt:350m"]
            command += ["--nproc", "2", "--steps", "3", "--seq-len", "64", "--out", str(out)]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            ledger = json.loads((out / "ledger.json").read_text())["ranks"][0]
            records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            steps = [record for record in records if record["event"] == "step"]
            found[home] = (ledger, [record["loss"] for record in steps])
            predicted, measured = ledger["predicted"]["total"], ledger["measured"]["total"]
            print(
                f"{home}: resident {measured / 2**20:.0f} MiB, predicted {predicted / 2**20:.0f} MiB "
                f"({measured / predicted - 1:+.1%}); step {steps[-1]['step_s']:.1f} s, of it waiting for the disk "
                f"{steps[-1]['offload_wait_s']['disk']:.2f} s"
            )
    print(f"losses equal to the last bit: {found['disk'][1] == found['memory'][1]} ({found['disk'][1]})")


if __name__ == "__main__":
    main()
