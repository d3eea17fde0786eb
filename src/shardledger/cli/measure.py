"""``shardledger plan --measure``: what a rank of this machine computes and sends per second, in a few seconds.

The link is measured between ranks started here: over NVLink or PCIe with several GPUs, over loopback on the CPU. A
network between machines is slower and must be given with ``--bandwidth``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from shardledger.cli.launch import rank_environment
from shardledger.errors import ConfigError, ShardledgerError, TransportError

RANKS = 2
SECONDS = 1.0
"""Spent on each figure."""
TIMEOUT_S = 90
MESSAGE_BYTES = 2**25
DISK_BYTES = 2**28
_WIDTH = {"cuda": 8192, "cpu": 1024}
"""Rows of the square matrices: large enough that the kernel is what is measured."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What was found."""

    flops: float
    """Operations per second of matrix products in bf16 on one rank."""
    bandwidth: float | None
    """Bytes per second that one rank sends while it gathers; None when this machine has one GPU, so no link."""
    where: str
    """What was measured, for people."""
    host: float | None = None
    """Bytes per second between the device and host memory; None where those are one."""
    disk: float | None = None
    """Bytes per second of the disk, reading and writing at once."""

    def __str__(self) -> str:
        link = (
            "not measurable with one GPU (give --bandwidth)" if self.bandwidth is None else _rate(self.bandwidth, "B/s")
        )
        host = "" if self.host is None else f", device to host memory {_rate(self.host, 'B/s')}"
        disk = "" if self.disk is None else f", disk {_rate(self.disk, 'B/s')} read and written together"
        products = f"{_rate(self.flops, 'FLOP/s')} of bf16 matrix products"
        return f"measured on {self.where}: {products}, link {link} per rank{host}{disk}"


def measure(folder: str | None = None) -> Measured:
    """Measure this machine, and the disk of ``folder`` (None: the current one); takes a few seconds.

    Raises:
        ConfigError: nothing can be written to ``folder``.
        TransportError: the two ranks that measure the link did not come to an end.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    kind = "cuda" if gpus else "cpu"
    where = torch.cuda.get_device_name(0) if gpus else f"the CPU ({torch.get_num_threads()} threads)"
    bandwidth = _link(kind) if gpus != 1 else None
    return Measured(
        flops=matmul_flops(kind),
        bandwidth=bandwidth,
        where=where,
        host=_host_link() if gpus else None,
        disk=_disk(folder or "."),
    )


def print_measurement(folder: str | None = None) -> None:
    """``plan --measure`` alone."""
    found = measure(folder)
    print(found)
    link = "" if found.bandwidth is None else f"--bandwidth {found.bandwidth:.3g} "
    host = "" if found.host is None else f" --link {found.host:.3g}"
    disk = "" if found.disk is None else f" --disk {found.disk:.3g}"
    print(f"as options of plan: {link}--flops {found.flops:.3g}{host}{disk}")


def matmul_flops(kind: str, seconds: float = SECONDS) -> float:
    """Operations per second of bf16 matrix products on ``cuda`` or ``cpu``, the best of several short rounds."""
    import torch

    width = _WIDTH[kind]
    left = torch.randn(width, width, device=kind, dtype=torch.bfloat16)
    right, out = torch.randn_like(left), torch.empty_like(left)

    def once() -> float:
        start = time.perf_counter()
        torch.mm(left, right, out=out)
        if kind == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()  # the first call chooses kernels
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, once())
    return 2 * width**3 / best


def _disk(folder: str) -> float:
    """Bytes per second that pass when a file is read and written at once, as the optimizer's step does.

    Raises:
        ConfigError: nothing can be written to the folder.
    """
    from shardledger.transport.disk import AlignedBuffer, DiskFile, TierTraffic

    size = DISK_BYTES
    try:
        with tempfile.TemporaryDirectory(prefix="shardledger-measure-", dir=folder) as place:
            file = DiskFile(Path(place) / "measured.bin", 2 * size, TierTraffic())
            try:
                source, target = AlignedBuffer(size), AlignedBuffer(size)
                file.write(0, source, 0, size).wait()  # what is read must have been written
                start = time.perf_counter()
                under_way = [file.write(size, source, 0, size), file.read(0, target, 0, size)]
                for transfer in under_way:
                    transfer.wait()
                return 2 * size / (time.perf_counter() - start)
            finally:
                file.close()
    except (OSError, ShardledgerError) as error:
        raise ConfigError(f"--nvme-path {folder}: the disk cannot be measured there: {error}") from error


def _host_link() -> float:
    """Bytes per second of the slower way between the GPU and page-locked host memory."""
    import torch

    host = torch.empty(MESSAGE_BYTES * 8, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    ways = []
    for target, source in ((device, host), (host, device)):
        rates = []
        for _ in range(4):  # the first one is slower
            torch.cuda.synchronize()
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(host.numel() / (time.perf_counter() - start))
        ways.append(max(rates))
    return min(ways)


def _link(kind: str) -> float:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {**os.environ, **rank_environment(os.environ, RANKS), "WORLD_SIZE": str(RANKS)}
    base.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    command = [sys.executable, "-m", "shardledger.cli.measure", kind]
    ranks = [
        subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise TransportError(f"measuring the link took longer than {TIMEOUT_S} s; give --bandwidth instead.") from None
    finally:
        for rank in ranks:
            rank.kill()
    failed = [(number, said[1]) for number, (rank, said) in enumerate(zip(ranks, told, strict=True)) if rank.returncode]
    if failed:
        number, error = failed[0]
        last = error.strip().splitlines()[-1:] or ["no message"]
        raise TransportError(f"measuring the link failed on rank {number}: {last[0]}; give --bandwidth instead.")
    return float(min(json.loads(said[0])["bandwidth"] for said in told))


def _rank(kind: str) -> None:
    """One of the ranks that measure the link: gather for a second, print bytes per second."""
    import torch

    from shardledger.transport import find_place, join, leave

    place = find_place()
    device = torch.device(kind, place.local_rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    transport, _ = join(place, device, TIMEOUT_S / 2)
    full = torch.zeros(MESSAGE_BYTES // 2, device=device, dtype=torch.bfloat16)
    rounds = 3  # the first one connects
    best = 0.0
    for _ in range(rounds):
        before = sum(traffic.bytes for traffic in transport.counters.traffic.values())
        start = time.perf_counter()
        for _ in range(8):
            transport.all_gather(full, "measurement").wait()
        if kind == "cuda":
            torch.cuda.synchronize()
        spent = time.perf_counter() - start
        sent = sum(traffic.bytes for traffic in transport.counters.traffic.values()) - before
        best = max(best, sent / spent)
    print(json.dumps({"bandwidth": best}))
    leave()


def _rate(value: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


if __name__ == "__main__":
    _rank(sys.argv[1])
