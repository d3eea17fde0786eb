"""The contract of ``Transport``, held by every implementation: threads with a fake wire, one rank alone, gloo, shared memory.

All cases of ``transport_cases`` run once per implementation and world size; each test judges one of them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from contracts.transport_cases import BUCKETS, CASES, DTYPES, SHARD, contribution, numbers, run_cases
from shardledger.transport.local import SoloMailbox, ThreadOffice
from shardledger.transport.peers import PeerTransport
from support.ranks import RankError, run_ranks
from support.training import group

IMPLEMENTATIONS = [
    ("solo", 1),
    *(("threads", world) for world in (1, 2, 3, 4, 5)),
    *(("gloo", world) for world in (2, 3, 4)),
    *(("shared memory", world) for world in (2, 3, 4)),
]
TREES: dict[int, Callable[[list[Tensor]], Tensor]] = {
    1: lambda p: p[0],
    2: lambda p: p[0] + p[1],
    3: lambda p: (p[0] + p[1]) + p[2],
    4: lambda p: (p[0] + p[1]) + (p[2] + p[3]),
    5: lambda p: ((p[0] + p[1]) + (p[2] + p[3])) + p[4],
}


def on_threads(world: int) -> list[dict[str, Any]]:
    office = ThreadOffice(world)
    found: list[dict[str, Any]] = [{} for _ in range(world)]

    def one(rank: int) -> None:
        found[rank].update(run_cases(PeerTransport(office.mailbox(rank))))

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def on_gloo() -> dict[str, Any]:
    from shardledger.transport.gloo import GlooMailbox

    with group(20):
        return run_cases(PeerTransport(GlooMailbox()))


def on_shared_memory() -> dict[str, Any]:
    from shardledger.transport.meeting import meet
    from shardledger.transport.neighbours import NeighboursMailbox

    with group(20):
        transport = meet(1, "auto", 20.0)
        assert isinstance(transport._mailbox, NeighboursMailbox)
        return run_cases(transport)


@functools.cache
def results(kind: str, world: int) -> list[dict[str, Any]]:
    if kind == "solo":
        return [run_cases(PeerTransport(SoloMailbox()))]
    if kind == "threads":
        return on_threads(world)
    try:
        return run_ranks(on_gloo if kind == "gloo" else on_shared_memory, world)
    except RankError as error:  # a result like any other, so that it is found once and not by every test anew
        return [dict.fromkeys(CASES, error)] * world


@pytest.fixture(params=IMPLEMENTATIONS, ids=lambda value: f"{value[0]}-{value[1]}")
def implementation(request) -> tuple[str, int]:
    return request.param


@pytest.fixture
def outcome(implementation) -> Callable[[str], list[Any]]:
    """By case: what each rank found."""

    def of(case: str) -> list[Any]:
        found = [rank.get(case) for rank in results(*implementation)]
        for rank, value in enumerate(found):
            if isinstance(value, Exception):
                raise AssertionError(f"rank {rank}: {value}") from value
            assert value is not None, f"rank {rank} did not get to {case}"
        return found

    return of


def summed(world: int, *, rounded: bool = False, shift: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tree sum of all contributions in fp32, as [world, shard]; ``rounded`` through bf16 first."""
    parts = [contribution(rank + shift, world, dtype) for rank in range(world)]
    if rounded:
        parts = [part.to(torch.bfloat16) for part in parts]
    return TREES[world]([part.float() for part in parts]).view(world, SHARD)


# --- reduce_scatter --------------------------------------------------------------------------------------------------


def test_reduction_in_fp32_is_the_tree_sum_bit_for_bit(outcome, implementation):
    world = implementation[1]
    expected = summed(world)
    for rank, found in enumerate(outcome("reduce_fp32")):
        for bucket in BUCKETS:
            assert torch.equal(found[bucket], expected[rank]), f"rank {rank}, bucket {bucket}"


def test_a_bf16_wire_rounds_each_contribution_once_and_sums_in_fp32(outcome, implementation):
    world = implementation[1]
    expected = summed(world, rounded=world > 1)  # with one rank nothing travels, so nothing is rounded
    for rank, found in enumerate(outcome("reduce_fp32_over_bf16")):
        for bucket in BUCKETS:
            assert torch.equal(found[bucket], expected[rank]), f"rank {rank}, bucket {bucket}"


def test_bf16_gradients_are_summed_in_fp32(outcome, implementation):
    expected = summed(implementation[1], dtype=torch.bfloat16)
    for rank, found in enumerate(outcome("reduce_bf16")):
        for bucket in BUCKETS:
            assert found[bucket].dtype == torch.float32
            assert torch.equal(found[bucket], expected[rank]), f"rank {rank}, bucket {bucket}"
    for rank, found in enumerate(outcome("reduce_bf16_over_fp32")):
        assert torch.equal(found, expected[rank])


def test_accumulation_adds_the_whole_sum_to_what_is_there(outcome, implementation):
    expected = summed(implementation[1])
    for rank, found in enumerate(outcome("reduce_adding")):
        for bucket in BUCKETS:
            assert torch.equal(found[bucket], numbers(rank, torch.float32, SHARD) + expected[rank])


def test_the_result_may_lie_in_the_input_and_the_rest_of_the_input_is_only_read(outcome, implementation):
    world = implementation[1]
    for rank, found in enumerate(outcome("reduce_in_place")):
        for (wire, bucket), (shard, untouched) in found.items():
            expected = summed(world, rounded=wire == torch.bfloat16 and world > 1)
            assert torch.equal(shard, expected[rank]), f"rank {rank}, {wire}, bucket {bucket}"
            assert untouched, f"rank {rank}, {wire}, bucket {bucket}"


# --- the others ------------------------------------------------------------------------------------------------------


def test_all_gather_fills_every_interval_in_place(outcome, implementation):
    world = implementation[1]
    for found in outcome("all_gather"):
        for dtype in DTYPES:
            assert torch.equal(found[dtype], torch.cat([numbers(rank, dtype) for rank in range(world)])), dtype


def test_gather_collects_the_shards_on_the_root_alone(outcome, implementation):
    world = implementation[1]
    everything = torch.cat([numbers(rank, torch.float32) for rank in range(world)])
    for rank, found in enumerate(outcome("gather_to")):
        for root in range(world):
            full, shard = found[root]
            assert torch.equal(shard, numbers(rank, torch.float32))
            assert (full is not None and torch.equal(full, everything)) if rank == root else full is None


def test_scatter_hands_each_rank_its_interval(outcome, implementation):
    world = implementation[1]
    for rank, found in enumerate(outcome("scatter_from")):
        for root in range(world):
            everything = torch.arange(world * 11.0) + root
            shard, full = found[root]
            assert torch.equal(shard, everything.view(world, -1)[rank])
            assert full is None or torch.equal(full, everything)


def test_broadcast_copies_every_dtype_from_any_root(outcome, implementation):
    world = implementation[1]
    for found in outcome("broadcast"):
        for root in {0, world - 1}:
            for dtype in DTYPES:
                assert torch.equal(found[str(dtype), root], numbers(root, dtype)), dtype
            assert found["bool", root].tolist() == [root % 2 == 0, root % 2 == 1, root % 2 == 0]
            assert found["large", root].tolist() == [2**62 + root, -(2**40) - root]
            assert torch.equal(found["2-D", root], torch.full((3, 2), float(root)))


def test_exchange_gives_every_rank_all_values(outcome, implementation):
    expected = torch.tensor([[float(rank), 2.0**52, -0.5] for rank in range(implementation[1])], dtype=torch.float64)
    for found in outcome("exchange"):
        assert found.dtype == torch.float64 and torch.equal(found, expected)


def test_collectives_in_flight_together_do_not_mix(outcome, implementation):
    world = implementation[1]
    for rank, found in enumerate(outcome("two_in_flight")):
        assert found["a"].view(world, -1)[:, 0].tolist() == [float(peer) for peer in range(world)]
        assert found["b"].view(world, -1)[:, 0].tolist() == [100.0 + peer for peer in range(world)]
        assert torch.equal(found["first"], summed(world)[rank])
        assert torch.equal(found["second"], summed(world, shift=50)[rank])
    for rank, found in enumerate(outcome("two_bucketed_in_flight")):
        assert torch.equal(found["first"], summed(world)[rank])
        assert torch.equal(found["second"], summed(world, shift=50)[rank])


def test_tensors_without_elements_go_through(outcome, implementation):
    for found in outcome("without_elements"):
        assert found == [(0,), (0,), (0,), (0, 3), (implementation[1], 0)]


def test_counters_hold_the_share_that_leaves_this_rank(outcome, implementation):
    """(world - 1) / world of the payload for reduce-scatter and all-gather; what a root sends; nothing for control of
    one's own."""
    world = implementation[1]
    others = world - 1
    for rank, found in enumerate(outcome("counters")):
        root = rank == 0
        expected = {
            "reduce_scatter": (2 * others * SHARD, others * SHARD * (2 + 4), 2),
            "all_gather": (others * 11, others * 11 * 2, 1),
            "control": (others * 3, others * 3 * 8, 1),
            "gather": None if root else (11, 44, 1),
            "scatter": (others * 11, others * 44, 1) if root else None,
            "broadcast": (others * 6, others * 48, 1) if root else None,
        }
        assert found == {kind: counts for kind, counts in expected.items() if counts is not None}


def test_work_is_done_once_and_waiting_is_counted(outcome, implementation):
    for rank, (before, after, seconds) in enumerate(outcome("waiting")):
        assert (before, after) == (False, True)
        assert 0 <= seconds < 5
        if rank > 0:
            assert seconds > 0.05, "rank 0 came 0.2 s late"
