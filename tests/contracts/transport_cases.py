"""What one rank does in each case of the transport contract. Plain functions of a transport, run on threads and in
processes; they return tensors and numbers for the test to judge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardledger.errors import PeerLostError
from shardledger.transport import ReduceHow, Transport

SHARD = 37
"""Elements of a shard: odd, so that buckets do not divide it."""

BUCKETS = (1, 8, 64, 10**9)
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8,
)  # fmt: skip


def contribution(rank: int, world: int, dtype: torch.dtype = torch.float32, shard: int = SHARD) -> Tensor:
    """A rank's full gradient, 1-D [world * shard]; sizes differ so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(1000 + rank)
    exponents = torch.randint(-4, 5, (world * shard,), generator=generator)
    return (torch.randn(world * shard, generator=generator) * 10.0**exponents).to(dtype)


def numbers(rank: int, dtype: torch.dtype, numel: int = 11) -> Tensor:
    """Exact in every dtype, different on every rank."""
    return (torch.arange(numel) % 7 + 10 * rank).to(dtype)


def how(wire: torch.dtype = torch.float32, bucket: int = 10**9, *, accumulate: bool = False) -> ReduceHow:
    return ReduceHow(wire=wire, accumulate=accumulate, bucket_numel=bucket, label="blocks.1")


def reduce(transport: Transport, full: Tensor, options: ReduceHow, out: Tensor | None = None) -> Tensor:
    if out is None:
        out = torch.full((full.numel() // transport.world,), float("nan"))
    transport.reduce_scatter(full, out, options).wait()
    return out


def reduce_fp32(transport: Transport) -> dict[int, Tensor]:
    full = contribution(transport.rank, transport.world)
    return {bucket: reduce(transport, full.clone(), how(bucket=bucket)) for bucket in BUCKETS}


def reduce_fp32_over_bf16(transport: Transport) -> dict[int, Tensor]:
    full = contribution(transport.rank, transport.world)
    return {bucket: reduce(transport, full.clone(), how(torch.bfloat16, bucket)) for bucket in BUCKETS}


def reduce_bf16(transport: Transport) -> dict[int, Tensor]:
    full = contribution(transport.rank, transport.world, torch.bfloat16)
    return {bucket: reduce(transport, full.clone(), how(torch.bfloat16, bucket)) for bucket in BUCKETS}


def reduce_bf16_over_fp32(transport: Transport) -> Tensor:
    full = contribution(transport.rank, transport.world, torch.bfloat16)
    return reduce(transport, full, how(torch.float32, 16))


def reduce_adding(transport: Transport) -> dict[int, Tensor]:
    found = {}
    for bucket in BUCKETS:
        out = numbers(transport.rank, torch.float32, SHARD)
        full = contribution(transport.rank, transport.world)
        found[bucket] = reduce(transport, full, how(bucket=bucket, accumulate=True), out)
    return found


def reduce_in_place(transport: Transport) -> dict[tuple[torch.dtype, int], tuple[Tensor, bool]]:
    """``out`` is this rank's interval of ``full``; also whether the rest of ``full`` was left alone."""
    found = {}
    for wire in (torch.float32, torch.bfloat16):
        for bucket in BUCKETS:
            full = contribution(transport.rank, transport.world)
            before = full.clone()
            rows, old = full.view(transport.world, -1), before.view(transport.world, -1)
            reduce(transport, full, how(wire, bucket), rows[transport.rank])
            others = [peer for peer in range(transport.world) if peer != transport.rank]
            found[wire, bucket] = rows[transport.rank].clone(), torch.equal(rows[others], old[others])
    return found


def all_gather(transport: Transport) -> dict[torch.dtype, Tensor]:
    found = {}
    for dtype in DTYPES:
        full = torch.zeros(transport.world * 11, dtype=dtype)
        full.view(transport.world, -1)[transport.rank] = numbers(transport.rank, dtype)
        transport.all_gather(full, "blocks.1").wait()
        found[dtype] = full
    return found


def gather_to(transport: Transport) -> dict[int, tuple[Tensor | None, Tensor]]:
    """By root: what the root collected, and the shard, which must be as before."""
    found = {}
    for root in range(transport.world):
        full = torch.zeros(transport.world * 11) if transport.rank == root else None
        shard = numbers(transport.rank, torch.float32)
        transport.gather_to(root, full, shard, "blocks.1")
        found[root] = full, shard
    return found


def scatter_from(transport: Transport) -> dict[int, tuple[Tensor, Tensor | None]]:
    """By root: the shard handed out, and the root's full, which must be as before."""
    found = {}
    for root in range(transport.world):
        full = torch.arange(transport.world * 11.0) + root if transport.rank == root else None
        shard = torch.full((11,), -1.0)
        transport.scatter_from(root, full, shard, "blocks.1")
        found[root] = shard, full
    return found


def broadcast(transport: Transport) -> dict[tuple[str, int], Tensor]:
    found = {}
    for root in {0, transport.world - 1}:
        for dtype in DTYPES:
            tensor = numbers(transport.rank, dtype)
            transport.broadcast(tensor, root, "buffer x")
            found[str(dtype), root] = tensor
        flags = torch.tensor([True, False, True]) ^ (transport.rank % 2 == 1)
        transport.broadcast(flags.view(torch.uint8), root, "buffer flags")
        found["bool", root] = flags
        large = torch.tensor([2**62 + transport.rank, -(2**40) - transport.rank])
        transport.broadcast(large, root, "buffer count")
        found["large", root] = large
        square = torch.full((3, 2), float(transport.rank))
        transport.broadcast(square, root, "buffer square")
        found["2-D", root] = square
    return found


def exchange(transport: Transport) -> Tensor:
    return transport.exchange(torch.tensor([float(transport.rank), 2.0**52, -0.5], dtype=torch.float64), "norms")


def two_in_flight(transport: Transport) -> dict[str, Tensor]:
    """Collectives begun together and waited for in another order than they were begun."""
    rank, world = transport.rank, transport.world
    gathered = [torch.zeros(world * 5) for _ in range(2)]
    for number, full in enumerate(gathered):
        full.view(world, -1)[rank] = 100.0 * number + rank
    outs = [torch.empty(SHARD) for _ in range(2)]
    fulls = [contribution(rank, world), contribution(rank + 50, world)]
    first = transport.all_gather(gathered[0], "a")
    reduction = transport.reduce_scatter(fulls[0], outs[0], how())
    second = transport.all_gather(gathered[1], "b")
    again = transport.reduce_scatter(fulls[1], outs[1], how())
    for work in (again, second, reduction, first):
        work.wait()
    return {"a": gathered[0], "b": gathered[1], "first": outs[0], "second": outs[1]}


def two_bucketed_in_flight(transport: Transport) -> dict[str, Tensor]:
    rank, world = transport.rank, transport.world
    outs = [torch.empty(SHARD) for _ in range(2)]
    fulls = [contribution(rank, world), contribution(rank + 50, world)]
    works = [transport.reduce_scatter(full, out, how(bucket=4 * world)) for full, out in zip(fulls, outs, strict=True)]
    for work in works:
        work.wait()
    return {"first": outs[0], "second": outs[1]}


def without_elements(transport: Transport) -> list[tuple[int, ...]]:
    world = transport.world
    out, full, shard = torch.empty(0), torch.empty(0), torch.empty(0)
    transport.reduce_scatter(torch.empty(0), out, how(bucket=1)).wait()
    transport.all_gather(full, "empty").wait()
    transport.gather_to(0, torch.empty(0) if transport.rank == 0 else None, shard, "empty")
    transport.scatter_from(world - 1, torch.empty(0) if transport.rank == world - 1 else None, shard, "empty")
    square = torch.empty(0, 3, dtype=torch.int64)
    transport.broadcast(square, 0, "empty")
    rows = transport.exchange(torch.empty(0, dtype=torch.float64), "empty")
    # What follows must not meet a message left behind.
    after = transport.exchange(torch.tensor([float(transport.rank)]), "after")
    assert after.flatten().tolist() == [float(rank) for rank in range(world)]
    return [tuple(t.shape) for t in (out, full, shard, square, rows)]


def counters(transport: Transport) -> dict[str, tuple[int, int, int]]:
    """What a known set of collectives adds to the counters: elements, bytes, calls by kind."""
    rank, world = transport.rank, transport.world
    before = transport.counters.snapshot()
    reduce(transport, contribution(rank, world), how(torch.bfloat16, 16))
    reduce(transport, contribution(rank, world), how(torch.float32))
    transport.all_gather(torch.zeros(world * 11, dtype=torch.bfloat16), "x").wait()
    transport.gather_to(0, torch.zeros(world * 11) if rank == 0 else None, torch.zeros(11), "x")
    transport.scatter_from(0, torch.zeros(world * 11) if rank == 0 else None, torch.zeros(11), "x")
    transport.broadcast(torch.zeros(6, dtype=torch.int64), 0, "x")
    transport.exchange(torch.zeros(3, dtype=torch.float64), "x")
    found = {}
    for kind, now in transport.counters.snapshot().items():
        change = now.minus(before[kind]) if kind in before else now
        if change.calls:
            found[kind] = (change.elements, change.bytes, change.calls)
    return found


def waiting(transport: Transport) -> tuple[bool, bool, float]:
    """Whether the work is done before and after ``wait``, and the seconds counted while rank 0 was late."""
    started = transport.counters.wait_s
    full = torch.zeros(transport.world * 5)
    if transport.rank == 0:
        time.sleep(0.2)
    work = transport.all_gather(full, "late")
    before = work.done
    work.wait()
    work.wait()
    return before, work.done, transport.counters.wait_s - started


CASES: dict[str, Callable[[Transport], Any]] = {
    case.__name__: case
    for case in (
        reduce_fp32, reduce_fp32_over_bf16, reduce_bf16, reduce_bf16_over_fp32, reduce_adding, reduce_in_place,
        all_gather, gather_to, scatter_from, broadcast, exchange, two_in_flight, two_bucketed_in_flight,
        without_elements, counters, waiting,
    )
}  # fmt: skip


def run_cases(transport: Transport) -> dict[str, Any]:
    """All cases one after another; an exception is a result."""
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        try:
            found[name] = case(transport)
        except PeerLostError as error:
            found[name] = error
            break  # the ranks are no longer at the same case
        except Exception as error:  # noqa: BLE001 - the test raises it
            found[name] = error
    return found
