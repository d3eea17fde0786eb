"""A peer that dies, goes silent or sends something else: an error that names it, soon, and never a number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardledger.errors import PeerLostError, RanksDisagreeError, TransportError
from shardledger.transport import Mailbox, ReduceHow, Transport
from shardledger.transport.local import FaultyMailbox, SoloMailbox, ThreadOffice
from shardledger.transport.peers import PeerTransport
from support.ranks import run_ranks, run_ranks_raw
from support.training import group

SILENCE_S = 0.3
PATIENCE_S = 15.0
"""Limit where nobody is silent: reached only when something hangs."""
HOW = ReduceHow(wire=torch.float32, accumulate=False, bucket_numel=4, label="blocks.7")


def reduce(transport: Transport, shard: int = 8) -> torch.Tensor:
    out = torch.full((shard,), -1.0)
    transport.reduce_scatter(torch.ones(transport.world * shard), out, HOW).wait()
    return out


def all_gather(transport: Transport) -> torch.Tensor:
    full = torch.full((transport.world * 4,), float(transport.rank))
    transport.all_gather(full, "blocks.7").wait()
    return full


def gather(transport: Transport) -> None:
    full = torch.empty(transport.world * 4) if transport.rank == 0 else None
    transport.gather_to(0, full, torch.ones(4), "blocks.7")


def scatter(transport: Transport) -> None:
    full = torch.ones(transport.world * 4) if transport.rank == 0 else None
    transport.scatter_from(0, full, torch.ones(4), "blocks.7")


def broadcast(transport: Transport) -> None:
    transport.broadcast(torch.ones(4), 0, "buffer gain")


def exchange(transport: Transport) -> torch.Tensor:
    return transport.exchange(torch.ones(2), "exchange of the gradient norm")


def on_threads(
    world: int,
    body: Callable[[Transport], Any],
    wrap: Callable[[Mailbox], Mailbox] = lambda mailbox: mailbox,
    silence_s: float = SILENCE_S,
) -> list[Any]:
    """What ``body`` returned or raised on each rank, seconds to it included: (result, seconds)."""
    office = ThreadOffice(world, timeout_s=silence_s)
    found: list[Any] = [None] * world
    together = threading.Barrier(world)

    def one(rank: int) -> None:
        together.wait()
        start = time.monotonic()
        try:
            result = body(PeerTransport(wrap(office.mailbox(rank))))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            result = error
        found[rank] = (result, time.monotonic() - start)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def breaking(rank: int, after: int) -> Callable[[Mailbox], Mailbox]:
    """The wire of ``rank`` breaks when it has sent ``after`` messages."""
    return lambda mailbox: FaultyMailbox(mailbox, after) if mailbox.rank == rank else mailbox


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("body", [reduce, all_gather, exchange])
def test_a_broken_wire_is_an_error_on_its_rank_and_names_it_on_the_others(body, after, world):
    found = on_threads(world, body, breaking(1, after))
    if body is not reduce and after >= 2 * (world - 1):  # a header and a payload to each
        assert not any(isinstance(result, Exception) for result, _ in found), "everything was sent before it broke"
        return
    own, _ = found[1]
    assert isinstance(own, PeerLostError) and own.peer not in (None, 1)
    for rank, (result, seconds) in enumerate(found):
        if rank == 1 or not isinstance(result, Exception):
            continue  # this rank had all it needed before the wire broke
        assert isinstance(result, PeerLostError)
        assert result.peer == 1, str(result)
        assert seconds < 10 * SILENCE_S
    assert any(isinstance(result, PeerLostError) for rank, (result, _) in enumerate(found) if rank != 1)


@pytest.mark.parametrize("body", [gather, scatter, broadcast])
def test_a_broken_wire_in_a_rooted_collective_names_the_peer(body):
    sender = 1 if body is gather else 0
    found = on_threads(2, body, breaking(sender, 0))
    for rank, (result, _) in enumerate(found):
        assert isinstance(result, PeerLostError)
        assert result.peer == 1 - rank


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("after", [exchange, all_gather, gather, broadcast])
def test_a_rank_that_leaves_a_reduction_open_and_goes_on_does_its_part_in_it_first(after, world):
    """Without that, one waits for the second bucket and the other for what never comes after it."""

    def go_on(transport: Transport) -> str:
        out = torch.empty(8)
        work = transport.reduce_scatter(torch.ones(world * 8), out, HOW)
        if transport.rank == 0:
            after(transport)
        work.wait()
        total = float(out.sum())
        if transport.rank != 0:
            after(transport)
        transport.close()
        return f"{total:g}"

    for result, seconds in on_threads(world, go_on, silence_s=PATIENCE_S):
        assert result == f"{8 * world}", result
        assert seconds < PATIENCE_S / 2

    def part(transport: Transport) -> None:
        works = [transport.reduce_scatter(torch.ones(world * 8), torch.empty(8), HOW) for _ in range(2)]
        if transport.rank == 0:
            after(transport)
        for work in works:
            work.wait()
        transport.broadcast(torch.ones(2), 0, "the last buffer")

    for rank, (result, seconds) in enumerate(on_threads(world, part, silence_s=PATIENCE_S)):
        assert isinstance(result, TransportError), result
        assert seconds < PATIENCE_S / 2
        if world == 2:
            assert isinstance(result, RanksDisagreeError) and "the last buffer" in str(result), rank


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("body", "what"),
    [(reduce, "reduction of unit blocks.7"), (all_gather, "all-gather of unit blocks.7"), (exchange, "gradient norm")],
)
def test_a_silent_peer_is_named_within_the_timeout(body, what, world):
    def one_is_silent(transport: Transport) -> Any:
        return None if transport.rank == 1 else body(transport)

    for rank, (result, seconds) in enumerate(on_threads(world, one_is_silent)):
        if rank == 1:
            continue
        assert isinstance(result, PeerLostError) and isinstance(result, TransportError)
        assert result.peer == 1
        for part in (f"rank {rank}:", what, "failed at rank 1", "look at its output"):
            assert part in str(result)
        assert SILENCE_S * 0.9 < seconds < 10 * SILENCE_S


@pytest.mark.parametrize("body", [gather, scatter, broadcast])
def test_a_silent_root_or_member_of_a_rooted_collective_is_named(body):
    silent = 1 if body is gather else 0
    found = on_threads(2, lambda transport: None if transport.rank == silent else body(transport))
    result, _ = found[1 - silent]
    assert isinstance(result, PeerLostError) and result.peer == silent
    assert ("buffer gain" if body is broadcast else "blocks.7") in str(result)


def test_time_spent_on_a_lost_peer_is_counted_as_waiting():
    def wait_in_vain(transport: Transport) -> float:
        with pytest.raises(PeerLostError):
            exchange(transport)
        return transport.counters.wait_s

    found = on_threads(2, lambda transport: None if transport.rank == 1 else wait_in_vain(transport))
    assert found[0][0] >= SILENCE_S * 0.9


@pytest.mark.parametrize(
    "other",
    [
        lambda transport: reduce(transport, shard=4),
        lambda transport: reduce(transport, shard=6),
        all_gather,
        exchange,
    ],
    ids=["another bucket", "another last bucket", "another collective", "another size"],
)
def test_ranks_that_run_different_collectives_are_both_told_at_once_with_both_collectives(other):
    how = ReduceHow(wire=torch.float32, accumulate=False, bucket_numel=16, label="blocks.7")

    def eight(transport: Transport) -> torch.Tensor:
        out = torch.full((8,), -1.0)
        transport.reduce_scatter(torch.ones(16), out, how).wait()
        return out

    found = on_threads(
        2, lambda transport: eight(transport) if transport.rank == 0 else other(transport), silence_s=PATIENCE_S
    )
    for rank, (result, _) in enumerate(found):
        assert isinstance(result, RanksDisagreeError), result
        assert f"Expected by rank {rank}" in str(result) and f"Got from rank {1 - rank}" in str(result)
        assert "reduction of unit blocks.7 (16 elements of float32)" in str(result)


def test_a_message_of_another_dtype_is_an_error():
    def body(transport: Transport) -> None:
        dtype = torch.float32 if transport.rank == 0 else torch.bfloat16
        transport.all_gather(torch.zeros(8, dtype=dtype), "blocks.7").wait()

    for result, _ in on_threads(2, body, silence_s=PATIENCE_S):
        assert isinstance(result, RanksDisagreeError)
        assert "8 elements of float32" in str(result) and "8 elements of bfloat16" in str(result)


def test_the_message_names_where_in_training_each_rank_stands():
    def body(transport: Transport) -> None:
        transport.where = f"step {transport.rank + 3}, forward"
        transport.all_gather(torch.zeros(8), f"experts.{transport.rank}").wait()

    for rank, (result, _) in enumerate(on_threads(2, body, silence_s=PATIENCE_S)):
        for part in (
            f"Expected by rank {rank} at step {rank + 3}, forward: all-gather of unit experts.{rank}",
            f"Got from rank {1 - rank} at step {4 - rank}, forward: all-gather of unit experts.{1 - rank}",
        ):
            assert part in str(result)


def test_the_same_collective_at_different_places_is_no_disagreement():
    def body(transport: Transport) -> list[float]:
        transport.where = f"step {transport.rank}, forward"
        return exchange(transport).flatten().tolist()

    assert [result for result, _ in on_threads(2, body, silence_s=PATIENCE_S)] == [[1.0] * 4] * 2


def test_a_name_too_long_for_the_header_still_tells_ranks_apart():
    def body(transport: Transport) -> None:
        transport.all_gather(torch.zeros(8), "blocks." * 80 + str(transport.rank)).wait()

    for result, _ in on_threads(2, body, silence_s=PATIENCE_S):
        assert isinstance(result, RanksDisagreeError) and "blocks.blocks." in str(result)
    same = on_threads(
        2, lambda transport: transport.all_gather(torch.zeros(8), "Blöcke." * 80).wait(), silence_s=PATIENCE_S
    )
    assert [result for result, _ in same] == [None, None]


def test_an_engine_that_ends_while_another_rank_trains_is_named_on_both():
    def body(transport: Transport) -> None:
        transport.where = f"step {7 + transport.rank}, forward"
        if transport.rank == 0:
            transport.close()
        else:
            exchange(transport)

    (left, _), (trains, _) = on_threads(2, body, silence_s=PATIENCE_S)
    assert isinstance(left, RanksDisagreeError) and isinstance(trains, RanksDisagreeError)
    assert "Got from rank 0 at step 7, forward: the end of the engine" in str(trains)
    assert "Got from rank 1 at step 8, forward: exchange of the gradient norm" in str(left)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_engines_that_end_together_end_in_peace(world):
    def body(transport: Transport) -> None:
        exchange(transport)
        transport.close()
        transport.close()

    assert [result for result, _ in on_threads(world, body, silence_s=PATIENCE_S)] == [None] * world


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_that_gives_up_tells_the_others_why(world):
    def body(transport: Transport) -> None:
        transport.where = "step 2, forward"
        if transport.rank == 1:
            transport.give_up("ValueError: no such token")
        else:
            exchange(transport)

    for rank, (result, _) in enumerate(on_threads(world, body, silence_s=PATIENCE_S)):
        if rank != 1:
            assert isinstance(result, PeerLostError) and result.peer == 1
            assert "rank 1 failed at step 2, forward: ValueError: no such token" in str(result)


def test_the_first_cause_reaches_ranks_that_wait_for_another_one():
    """Rank 2 disagrees with rank 1 only; rank 0 waits for rank 1's next collective and hears why it does not come."""

    def body(transport: Transport) -> None:
        exchange(transport)
        if transport.rank == 1:
            transport.give_up("rank 2 sent nonsense")
            return
        exchange(transport)

    for rank in (0, 2):
        result, _ = on_threads(3, body, silence_s=PATIENCE_S)[rank]
        assert isinstance(result, PeerLostError) and "rank 2 sent nonsense" in str(result)


def test_after_a_disagreement_nothing_runs_any_more():
    def body(transport: Transport) -> Exception:
        with pytest.raises(RanksDisagreeError):
            transport.all_gather(torch.zeros(8), f"experts.{transport.rank}").wait()
        with pytest.raises(RanksDisagreeError, match="earlier collective failed"):
            exchange(transport)
        transport.close()
        return None

    assert [result for result, _ in on_threads(2, body, silence_s=PATIENCE_S)] == [None, None]


def test_the_only_rank_has_nobody_to_write_to():
    box = SoloMailbox()
    with pytest.raises(RuntimeError, match="send to rank 1"):
        box.send(torch.ones(1), 1, 0)
    with pytest.raises(RuntimeError, match="receive from rank 1"):
        box.receive(torch.ones(1), 1, 0)


# --- the same over gloo ----------------------------------------------------------------------------------------------


def wait_for_silent_rank_1() -> tuple[int | None, str, float] | None:
    from shardledger.transport.gloo import GlooMailbox

    with group(1.0):
        transport = PeerTransport(GlooMailbox())
        transport.exchange(torch.ones(1), "everybody is here")
        if transport.rank == 1:
            time.sleep(2.5)
            return None
        start = time.monotonic()
        try:
            reduce(transport)
        except PeerLostError as error:
            return error.peer, str(error), time.monotonic() - start
        raise AssertionError("a number came out")


def test_gloo_names_a_silent_peer_within_the_timeout():
    peer, message, seconds = run_ranks(wait_for_silent_rank_1, 2)[0]
    assert peer == 1
    assert "reduction of unit blocks.7" in message and "failed at rank 1" in message
    assert seconds < 2.4


WRONG_SIZE = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from shardledger.transport.gloo import GlooMailbox
from shardledger.transport.peers import PeerTransport

dist.init_process_group("gloo", timeout=timedelta(seconds=3))
transport = PeerTransport(GlooMailbox())
transport.exchange(torch.ones(1), "everybody is here")
mine, theirs = {sizes}
full = torch.full((2 * (mine if transport.rank == 0 else theirs),), float(transport.rank + 1))
try:
    transport.all_gather(full, "blocks.7").wait()
    print("NUMBERS", full.tolist(), flush=True)
except Exception as error:
    print("ERROR", type(error).__name__, error, flush=True)
os._exit(5)
"""


@pytest.fixture(scope="module")
def four_against_six():
    """Rank 0 expects shards of 4 elements, rank 1 of 6."""
    return run_ranks_raw(WRONG_SIZE.format(sizes="4, 6"), 2, timeout=40)


def test_gloo_never_takes_a_message_of_another_size_for_the_expected_one(four_against_six):
    """Gloo alone would end the process that receives more than it expects."""
    for rank, ended in enumerate(four_against_six):
        assert ended.code == 5, ended.output
        assert "ERROR RanksDisagreeError" in ended.output
        assert f"Expected by rank {rank}" in ended.output
        assert "8 elements" in ended.output and "12 elements" in ended.output
