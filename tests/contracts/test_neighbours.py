"""Messages out of another rank's memory: what a socket would do by itself, and what can only go wrong here."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time

import pytest
import torch

from contracts.test_transport_faults import PATIENCE_S, SILENCE_S, all_gather, exchange, gather, reduce
from shardledger.errors import PeerLostError, RanksDisagreeError
from shardledger.transport.neighbours import Lines, NeighboursMailbox
from shardledger.transport.peers import PeerTransport
from support.ranks import run_ranks, run_ranks_raw
from support.training import group, place

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_yield"), reason="needs Linux")


def mailboxes(world: int, timeout_s: float = PATIENCE_S) -> list[NeighboursMailbox]:
    """Ranks that are threads of this process: it reads its own memory the same way."""
    lines = [Lines() for _ in range(world)]
    addresses = [one.address for one in lines]
    for rank, one in enumerate(lines):
        one.outboxes = {peer: address.open() for peer, address in enumerate(addresses) if peer != rank}
    return [NeighboursMailbox(rank, addresses, lines[rank], timeout_s) for rank in range(world)]


def on_threads(world: int, body, timeout_s: float = PATIENCE_S) -> list:
    """What `body(transport)` returned or raised on each rank."""
    found = [None] * world

    def one(mailbox: NeighboursMailbox) -> None:
        try:
            found[mailbox.rank] = body(PeerTransport(mailbox))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found[mailbox.rank] = error

    boxes = mailboxes(world, timeout_s)
    threads = [threading.Thread(target=one, args=(box,), daemon=True) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


@pytest.mark.parametrize("body", [reduce, all_gather, exchange, gather])
def test_a_silent_neighbour_is_named_within_the_timeout(body):
    start = time.monotonic()
    result = on_threads(3, lambda transport: None if transport.rank == 1 else body(transport), SILENCE_S)[0]
    assert isinstance(result, PeerLostError) and result.peer == 1, result
    assert "Timed out waiting 0.3 s" in str(result)
    assert SILENCE_S * 0.9 < time.monotonic() - start < 10 * SILENCE_S


def test_neighbours_that_run_different_collectives_are_both_told():
    found = on_threads(2, lambda transport: (reduce if transport.rank else all_gather)(transport))
    for rank, result in enumerate(found):
        assert isinstance(result, RanksDisagreeError) and f"Expected by rank {rank}" in str(result), result


def test_more_messages_than_the_board_has_slots_for_arrive_in_order():
    left, right = mailboxes(2)
    sent = [torch.full((1000,), float(number)) for number in range(200)]
    offers = [left.send(tensor, 1, 7) for tensor in sent]
    got = [torch.empty(1000) for _ in sent]
    requests = [right.receive(tensor, 0, 7) for tensor in got]
    while not all(message.done for message in (*offers, *requests)):
        for message in (*requests, *offers):
            message.neighbour.look()
    assert [float(t[0]) for t in got] == list(range(200)) and torch.equal(torch.stack(got), torch.stack(sent))


def test_ranks_may_wait_in_different_orders():
    def body(transport: PeerTransport) -> list[float]:
        fulls = [torch.full((2, 5000), float(transport.rank + number)).flatten() for number in range(4)]
        works = [transport.all_gather(full, f"blocks.{number}") for number, full in enumerate(fulls)]
        for work in works if transport.rank else reversed(works):
            work.wait()
        return [float(full.view(2, -1)[1 - transport.rank, 0]) for full in fulls]

    assert on_threads(2, body) == [[1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.0, 3.0]]


def test_a_small_buffer_may_be_reused_at_once_and_a_large_one_when_it_was_taken():
    left, right = mailboxes(2)
    small, large = torch.ones(4), torch.ones(5000)
    left.send(small, 1, 1).wait()
    offer = left.send(large, 1, 2)
    small.zero_()
    assert not offer.done
    got = torch.empty(4), torch.empty(5000)
    for tag, tensor in enumerate(got, 1):
        right.receive(tensor, 0, tag).wait()
    offer.wait()
    assert all(bool((tensor == 1).all()) for tensor in got)


def test_what_a_rank_gave_up_sending_is_never_taken_for_the_payload():
    left, right = mailboxes(2)
    offers = [left.send(torch.ones(5000), 1, tag) for tag in (1, 2)]
    right.receive(torch.empty(5000), 0, 1).wait()  # has now seen both
    with pytest.raises(RuntimeError, match="Timed out"):
        offers[1].wait(0.0)
    with pytest.raises(RuntimeError, match="Connection closed by rank 0: it has given up"):
        right.receive(torch.empty(5000), 0, 2).wait()


def test_what_a_rank_sent_before_it_went_is_received():
    left, right = mailboxes(2)
    left.send(torch.ones(5), 1, 1)
    left.send(torch.ones(5000), 1, 2)
    del left
    gc.collect()
    with pytest.raises(RuntimeError, match="Connection closed by rank 0: it has ended"):
        right.receive(torch.empty(5), 0, 3).wait()
    got = torch.empty(5)
    right.receive(got, 0, 1).wait()
    assert bool((got == 1).all())
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
        right.receive(torch.empty(5000), 0, 2).wait()


def test_another_size_than_expected_is_an_error():
    left, right = mailboxes(2)
    left.send(torch.ones(5000), 1, 2)
    with pytest.raises(RuntimeError, match="it sends 20000 bytes where 8 are expected"):
        right.receive(torch.empty(2), 0, 2).wait()


def test_a_process_that_ended_and_one_that_got_its_number_are_told_from_the_neighbour():
    board, own, other = Board(2), Seat(), Seat()
    os.close(board.file)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    gone = Place(child, other.place.address, other.place.nonce)
    stranger = Place(os.getpid(), other.place.address, other.place.nonce + 1)
    for place_of_1 in (gone, stranger):
        mailbox = NeighboursMailbox(0, board, own, [own.place, place_of_1], PATIENCE_S)
        with pytest.raises(RuntimeError, match="Connection closed by rank 1: it has ended"):
            mailbox.receive(torch.empty(2), 1, 1).wait()
        mailbox.send(torch.empty(5000), 1, 1).wait()  # nobody reads the buffer


def test_reads_beyond_what_the_kernel_moves_at_once_are_cut():
    assert pieces(8, 5) == [(8, 5)] and pieces(8, 0) == []
    parts = pieces(0, 5 << 29)
    assert sum(size for _, size in parts) == 5 << 29 and max(size for _, size in parts) < (1 << 31) - 4096
    assert [start for start, _ in parts] == [0, 1 << 30, 2 << 30]


# --- agreement on the wire -------------------------------------------------------------------------------------------


def choose() -> list[tuple[bool, str]]:
    """By case: whether shared memory was taken, and what was logged."""
    from shardledger.transport import meeting

    found = []
    rank = place()[0]
    real = meeting._look_around
    with group(20):
        for number, (wires, code) in enumerate(
            [(("auto", "auto"), 0), (("shared_memory", "auto"), 0), (("shared_memory", "gloo"), 0),
             (("gloo", "gloo"), 0), (("shared_memory", "shared_memory"), 1)]
        ):  # fmt: skip
            lines: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record, lines=lines: lines.append(record.getMessage())
            logging.getLogger("shardledger").addHandler(handler)
            meeting._look_around = lambda *seen, code=code: (0, code) if code and rank == 1 else real(*seen)
            transport = meeting.meet(number, wires[rank], 20.0)
            rows = transport.exchange(torch.tensor([float(rank)]), "works")
            transport.close()
            assert rows.flatten().tolist() == [0.0, 1.0]
            logging.getLogger("shardledger").removeHandler(handler)
            meeting._look_around = real
            found.append((isinstance(transport._mailbox, NeighboursMailbox), "\n".join(lines)))
    return found


def test_all_ranks_use_shared_memory_or_none_and_one_of_them_says_why_not():
    first, second = run_ranks(choose, 2)
    assert [shared for shared, _ in first] == [True, True, False, False, False]
    assert [shared for shared, _ in second] == [shared for shared, _ in first]
    assert [text for _, text in first[:2] + first[3:4]] == ["", "", ""] and {text for _, text in second} == {""}
    assert first[2][1] == "rank 1 was told to use gloo, so all ranks do."
    assert first[4][1].startswith("rank 1 cannot read the memory of rank 0: the kernel forbids it")


LAST_WORDS = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
from shardledger.transport.meeting import meet

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
transport = meet(1, "auto", 30.0)
before = set(os.listdir("/dev/shm"))
transport.exchange(torch.ones(1), "everybody is here")
if transport.rank == 2:
    try:
        raise ValueError("no such token")
    except ValueError as error:
        transport.where = "step 2, forward"
        transport._guard.give_up(str(error), 0.0)
    os._exit(3)
if transport.rank == 1:
    os.kill(os.getpid(), 9)
time.sleep(1.5)
try:
    transport.exchange(torch.ones(1), "norms")
except Exception as error:
    print("ERROR", error, flush=True)
print("LEFT", set(os.listdir("/dev/shm")) - before, flush=True)
os._exit(5)
"""


def test_last_words_are_heard_from_a_process_that_is_gone_and_nothing_stays_behind():
    listener, killed, speaker = run_ranks_raw(LAST_WORDS, 3, timeout=40)
    assert (listener.code, killed.code, speaker.code) == (5, -9, 3), (listener, killed, speaker)
    assert "rank 2 failed at step 2, forward: no such token" in listener.output
    assert "LEFT set()" in listener.output
