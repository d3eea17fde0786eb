"""How fast checkpoints are written, as a ratio to ``torch.save`` of as many bytes; all variants in one interleaved run.

    python benchmarks/checkpoint.py [--megabytes 200] [--rounds 5] [--folder DIR]
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py

Prints medians and, in brackets, the fastest and the slowest round. ``torch.save`` leaves its bytes in the system's cache; a
checkpoint is on the disk when the call returns. Both are compared: ``torch.save`` as it is, and with the fsync that makes
it as safe. Where the disk takes its bytes more slowly than memory does, no durable save reaches the former: "the disk" is
as many bytes, written by all ranks past the cache and by nothing but system calls, and bounds every one. An asynchronous
save is compared with a save, and with copying the bytes alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

import shardledger as sl
from shardledger.transport.disk import AlignedBuffer

WIDTH = 1024


class Layer(nn.Module):
    """A block: one unit of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Equal blocks; returns a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def engine_of(layers: int, *, asynchronous: bool) -> sl.Engine:
    """An engine that has taken a step: weights and two moments in fp32, 12 bytes a parameter."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "shardledger": {"checkpoint": {"async": asynchronous}},
    }
    engine = sl.initialize(model=Stack(layers), config=config, device="cpu")[0]
    engine.backward(engine(torch.randn(1, WIDTH)))
    engine.step()
    return engine


def plain_save(path: Path, tensors: dict[str, Tensor], *, durable: bool) -> None:
    """What the ratio is to: one process, one file."""
    torch.save(tensors, path)
    if durable:
        with path.open("rb") as file:
            os.fsync(file.fileno())


def bare_writes(folder: Path, buffers: list[AlignedBuffer], nbytes: int) -> None:
    """What the disk takes: a file per thread, past the cache where the file system lets us, and an fsync."""

    def write(index: int, buffer: AlignedBuffer) -> None:
        path = folder / f"bare-{os.getpid()}-{index}"
        flags = os.O_WRONLY | os.O_CREAT
        try:
            handle = os.open(path, flags | getattr(os, "O_DIRECT", 0))
        except OSError:
            handle = os.open(path, flags)
        for _ in range(max(1, nbytes // len(buffers) // len(buffer.view))):
            os.write(handle, buffer.view)
        os.fsync(handle)
        os.close(handle)

    with ThreadPoolExecutor(len(buffers)) as threads:
        list(threads.map(write, range(len(buffers)), buffers))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    asked = parser.parse_args()
    layers = max(1, round(asked.megabytes * 1e6 / (12 * (WIDTH * WIDTH + WIDTH))))
    blocking, later = engine_of(layers, asynchronous=False), engine_of(layers, asynchronous=True)
    rank = blocking.rank
    folder = Path(asked.folder or (tempfile.gettempdir() + "/shardledger-benchmark"))
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    same = (
        {f"{k}-{i}": torch.randn(WIDTH * WIDTH + WIDTH) for k in range(3) for i in range(layers)} if rank == 0 else {}
    )
    size = 12 * (WIDTH * WIDTH + WIDTH) * layers
    mine = [torch.randn(size // 4 // blocking.world // (3 * layers)) for _ in range(3 * layers)]
    copies = [torch.zeros_like(tensor) for tensor in mine]
    buffers = [AlignedBuffer(1 << 20) for _ in range(4)]
    for buffer in buffers:
        buffer.tensor.random_()
    seconds: dict[str, list[float]] = {}

    def timed(name: str, action: Callable[[], object]) -> None:
        blocking.gather_scalars([0.0])
        begin = time.perf_counter()
        action()
        blocking.gather_scalars([0.0])  # until the slowest rank is done
        seconds.setdefault(name, []).append(time.perf_counter() - begin)

    for round_ in range(asked.rounds + 1):
        for durable, name in ((False, "torch.save"), (True, "torch.save + fsync")):
            path = folder / f"plain-{round_}-{durable}.pt"
            timed(name, lambda: plain_save(path, same, durable=durable) if rank == 0 else None)  # noqa: B023
        timed("save_checkpoint", lambda: blocking.save_checkpoint(folder / "ours", "t"))
        timed("the disk", lambda: bare_writes(folder, buffers, size // blocking.world))
        timed("copy in memory", lambda: [copy.copy_(tensor) for copy, tensor in zip(copies, mine, strict=True)])
        timed("asynchronous, blocked", lambda: later.save_checkpoint(folder / "later", "t"))
        timed("asynchronous, the rest", later.checkpoints.wait)
        timed("load_checkpoint", lambda: blocking.load_checkpoint(folder / "ours"))
        if round_ == 0:
            seconds.clear()  # warms caches and allocators
        if rank == 0:
            # Removed together, and waited for: the next file to reach the disk would pay for it.
            shutil.rmtree(folder)
            folder.mkdir()
            os.sync()
    if rank == 0:
        report(seconds, size, blocking.world)
    blocking.destroy()


def report(seconds: dict[str, list[float]], size: int, world: int) -> None:
    """One line per variant, then the ratios."""
    print(f"{size / 1e6:.0f} MB over {world} rank(s)")
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"  {name:24s} {middle:6.3f} s [{min(values):.3f} .. {max(values):.3f}]  {size / 1e9 / middle:6.2f} GB/s")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"speed of save_checkpoint: {median['torch.save'] / median['save_checkpoint']:.0%} of torch.save, ", end="")
    print(f"{median['torch.save + fsync'] / median['save_checkpoint']:.0%} of torch.save + fsync, ", end="")
    print(f"{median['the disk'] / median['save_checkpoint']:.0%} of the disk")
    print(f"the disk bounds what is on it at {median['torch.save'] / median['the disk']:.0%} of torch.save")
    blocked = median["asynchronous, blocked"]
    print(f"asynchronous: training waits {blocked / median['save_checkpoint']:.0%} of a save, ", end="")
    print(f"{blocked / median['copy in memory']:.1f} times as long as for the copy alone")


if __name__ == "__main__":
    main()
