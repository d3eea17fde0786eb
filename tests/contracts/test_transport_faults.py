"""A peer that dies, goes silent or sends something else: an error that names it, soon, and never a number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardledger.errors import PeerLostError, TransportError
from shardledger.transport import Mailbox, ReduceHow, Transport
from shardledger.transport.local import FaultyMailbox, SoloMailbox, ThreadOffice
from shardledger.transport.peers import PeerTransport
from support.ranks import run_ranks, run_ranks_raw
from support.training import group

SILENCE_S = 0.3
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
    world: int, body: Callable[[Transport], Any], wrap: Callable[[Mailbox], Mailbox] = lambda mailbox: mailbox
) -> list[Any]:
    """What ``body`` returned or raised on each rank, seconds to it included: (result, seconds)."""
    office = ThreadOffice(world, timeout_s=SILENCE_S)
    found: list[Any] = [None] * world

    def one(rank: int) -> None:
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
@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("body", [reduce, all_gather, exchange])
def test_a_broken_wire_is_an_error_on_its_rank_and_names_it_on_the_others(body, after, world):
    found = on_threads(world, body, breaking(1, after))
    if body is not reduce and after >= world - 1:
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
def test_messages_of_different_collectives_never_meet_and_the_peer_is_named(other):
    how = ReduceHow(wire=torch.float32, accumulate=False, bucket_numel=16, label="blocks.7")

    def eight(transport: Transport) -> torch.Tensor:
        out = torch.full((8,), -1.0)
        transport.reduce_scatter(torch.ones(16), out, how).wait()
        return out

    (result, _), _ = on_threads(2, lambda transport: eight(transport) if transport.rank == 0 else other(transport))
    assert isinstance(result, TransportError)
    assert "rank 1" in str(result) and "another collective" in str(result)


def test_a_message_of_another_dtype_is_an_error():
    def body(transport: Transport) -> None:
        dtype = torch.float32 if transport.rank == 0 else torch.bfloat16
        transport.all_gather(torch.zeros(8, dtype=dtype), "blocks.7").wait()

    for result, _ in on_threads(2, body):
        assert isinstance(result, TransportError) and "another collective" in str(result)


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


def test_gloo_never_takes_a_longer_message_for_the_expected_one(four_against_six):
    """Gloo ends the process that receives more than it expects."""
    assert "NUMBERS" not in four_against_six[0].output
    assert four_against_six[0].code not in (0, None)


def test_gloo_never_takes_a_shorter_message_for_the_expected_one(four_against_six):
    assert "NUMBERS" not in four_against_six[1].output
