"""Messages out of another rank's memory: what a socket would do by itself, and what can only go wrong here."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch

from contracts.test_transport_faults import HOW, PATIENCE_S, SILENCE_S, all_gather, exchange, gather, reduce
from shardledger.errors import PeerLostError, RanksDisagreeError
from shardledger.telemetry.live import LiveBytes
from shardledger.transport import neighbours
from shardledger.transport.dry import DryPeers
from shardledger.transport.neighbours import Address, Lines, NeighboursMailbox
from shardledger.transport.peers import PeerTransport
from shardledger.transport.process_memory import read_memory
from support.ranks import run_ranks, run_ranks_raw
from support.training import group, place

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


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
    result = on_threads(2, lambda transport: None if transport.rank == 1 else body(transport), SILENCE_S)[0]
    assert isinstance(result, PeerLostError) and result.peer == 1, result
    assert "Timed out waiting 0.3 s" in str(result)
    assert SILENCE_S * 0.9 < time.monotonic() - start < 10 * SILENCE_S


def test_neighbours_that_run_different_collectives_are_both_told():
    found = on_threads(2, lambda transport: (reduce if transport.rank else all_gather)(transport))
    for rank, result in enumerate(found):
        assert isinstance(result, RanksDisagreeError) and f"Expected by rank {rank}" in str(result), result


def test_more_messages_than_the_inbox_has_room_for_arrive_in_order():
    left, right = mailboxes(2)
    sent = [torch.full((1000,), float(number)) for number in range(200)]  # each fills a page of the pipe, which has 16
    offers = [left.send(tensor, 1, 7) for tensor in sent]
    assert offers[0].done and not offers[-1].done, "what is still here may not be reused"
    got = [torch.empty(1000) for _ in sent]
    requests = [right.receive(tensor, 0, 7) for tensor in got]
    thread = threading.Thread(target=offers[-1].wait, daemon=True)
    thread.start()
    requests[-1].wait()
    thread.join(PATIENCE_S)
    assert all(message.done for message in (*offers, *requests))
    assert [float(t[0]) for t in got] == list(range(200)) and torch.equal(torch.stack(got), torch.stack(sent))


def test_what_comes_while_another_payload_is_copied_is_not_slept_over(monkeypatch):
    left, right = mailboxes(2)
    first, second = (right.receive(torch.empty(numel), 0, tag) for tag, numel in ((1, 5000), (2, 5)))

    def read(*place: int) -> None:
        read_memory(*place)
        left.send(torch.ones(5), 1, 2)

    monkeypatch.setattr(neighbours, "read_memory", read)
    left.send(torch.ones(5000), 1, 1)
    start = time.monotonic()
    second.wait()
    assert first.done and time.monotonic() - start < PATIENCE_S / 2


def test_who_waits_sleeps():
    left, right = mailboxes(2)
    threading.Timer(0.3, lambda: left.send(torch.ones(5000), 1, 1)).start()
    busy, start = time.thread_time(), time.monotonic()
    right.receive(torch.empty(5000), 0, 1).wait()
    assert time.monotonic() - start > 0.25
    assert time.thread_time() - busy < 0.05


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
    with pytest.raises(RuntimeError, match="Connection closed by rank 0"):
        right.send(torch.empty(5000), 0, 1).wait()


def test_another_size_than_expected_is_an_error():
    left, right = mailboxes(2)
    left.send(torch.ones(5000), 1, 2)
    with pytest.raises(RuntimeError, match="it sends 20000 bytes where 8 are expected"):
        right.receive(torch.empty(2), 0, 2).wait()


def test_a_peeked_message_is_read_in_pieces_and_its_sender_waits_until_it_is_released():
    left, right = mailboxes(2)
    for numel in (6, 6000):
        source, got = torch.arange(float(numel)), torch.empty(numel)
        offer, seen = left.send(source, 1, 1), right.peek(4 * numel, 0, 1)
        seen.wait()
        for start in range(0, numel, numel // 3):
            seen.read(got[start : start + numel // 3], 4 * start)
        assert torch.equal(got, source)
        with pytest.raises(RuntimeError, match="Timed out") if numel == 6000 else contextlib.nullcontext():
            offer.wait(0.0)
    with pytest.raises(RuntimeError, match="it has given up what it was sending"):
        seen.release()


def test_a_reduction_stages_at_most_a_quarter_of_a_mebibyte_of_what_others_send():
    full = torch.ones(2 << 20)
    staged = {}
    for wire in ("gloo", "shared_memory"):
        transport = DryPeers(0, 2, wire)
        with LiveBytes() as meter:
            work = transport.reduce_scatter(full, full[: 1 << 20], replace(HOW, bucket_numel=len(full)))
            staged[wire] = meter.total
            work.wait()
        assert meter.peaks.highest.total == staged[wire], "sums take no memory"
    assert {wire: nbytes / 2**20 for wire, nbytes in staged.items()} == pytest.approx(
        {"gloo": 8 + 4, "shared_memory": 8 + 0.25}, rel=1e-3
    )


def test_a_number_that_another_process_has_is_not_taken_for_the_neighbour():
    lines, other = Lines(), Lines()
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    for address in (replace(other.address, pid=child), replace(other.address, proof=other.address.proof + 1)):
        with pytest.raises(OSError, match="Errno 3"):
            address.open()
    mine = {os.readlink(f"/proc/self/fd/{file}") for file in (lines.inbox, other.inbox)}
    child = os.fork()
    if not child:  # a child, as of a DataLoader, keeps nobody's inbox open
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        os._exit(len(mine & {os.readlink(name) for name in names if os.path.exists(name)}))
    assert os.waitpid(child, 0)[1] == 0


# --- agreement on the wire -------------------------------------------------------------------------------------------


def choose() -> list[tuple[str, str, int]]:
    """By case: the wire, what was logged, and how many more files are open afterwards."""
    from shardledger.transport import meeting

    found = []
    rank = place()[0]
    real, lines = Address.open, []
    handler, logger = logging.Handler(), logging.getLogger("shardledger")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with group(20):
        for number, (wires, code) in enumerate(
            [(("auto", "auto"), 0), (("shared_memory", "auto"), 0), (("shared_memory", "gloo"), 0),
             (("gloo", "gloo"), 0), (("auto", "auto"), errno.EPERM), (("auto", "shared_memory"), errno.ESRCH)]
        ):  # fmt: skip
            lines.clear()
            open_files = len(os.listdir("/proc/self/fd"))

            def refused(address, code=code):
                raise OSError(code, os.strerror(code))

            Address.open = refused if code and rank == 1 else real
            transport = meeting.meet(number, wires[rank], 20.0)
            rows = transport.exchange(torch.tensor([float(rank)]), "works")
            transport.close()
            assert rows.flatten().tolist() == [0.0, 1.0]
            wire = transport.wire
            del transport
            gc.collect()
            found.append((wire, "\n".join(lines), len(os.listdir("/proc/self/fd")) - open_files))
    Address.open = real
    logger.removeHandler(handler)
    return found


def test_all_ranks_use_shared_memory_or_none_and_one_of_them_says_which_and_why():
    first, second = run_ranks(choose, 2)
    assert [wire for wire, *_ in first] == ["shared_memory", "shared_memory", "gloo", "gloo", "gloo", "gloo"]
    assert [wire for wire, *_ in second] == [wire for wire, *_ in first]
    assert {text for _, text, _ in second} == {""}
    assert {files for *_, files in (*first, *second)} == {0}, "an engine that ends leaves no file open"
    shared, _, told, quiet, forbidden, apart = (text for _, text, _ in first)
    assert shared == "2 ranks exchange payloads through shared memory." and quiet == ""
    assert told == "rank 1 was told to use gloo, so all ranks do."
    assert forbidden.startswith("rank 1 cannot read the memory of rank 0: the kernel forbids it")
    assert "different machines or in different containers" in apart


FORBIDDEN = """
import ctypes, os, torch
import shardledger as sl

torch.set_num_threads(1)
libc = ctypes.CDLL(None)
assert libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()) == 0  # root reads whom it likes
if os.environ["RANK"] == "1":
    libc.prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process may look into this one
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
engine = sl.initialize(model=torch.nn.Linear(4, 4), config=config)[0]
engine.backward(engine(torch.ones(2, 4)).sum())
engine.step()
print("WIRE", engine.plan.communication.wire, engine.config.shardledger.transport, engine.plan.reasons[-1], flush=True)
engine.destroy()
"""


def test_where_the_kernel_forbids_it_an_engine_trains_over_gloo_and_its_plan_says_so():
    for ended in run_ranks_raw(FORBIDDEN, 2, timeout=60):
        assert ended.code == 0, ended.output
        assert "WIRE gloo gloo ranks exchange payloads through gloo (shardledger.transport: auto)" in ended.output


LAST_WORDS = """
import os, time, torch, torch.distributed as dist
from datetime import timedelta
from shardledger.transport.meeting import meet

dist.init_process_group("gloo", timeout=timedelta(seconds=30))
transport = meet(1, "auto", 30.0)
files = lambda: {os.path.join(d, n) for d in ("/dev/shm", "/tmp") for n in os.listdir(d)}
before = files()
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
print("LEFT", [n for n in files() - before if "shardledger" in n or n.startswith("/dev/shm")], flush=True)
os._exit(5)
"""


def test_last_words_are_heard_from_a_process_that_is_gone_and_nothing_stays_behind():
    listener, killed, speaker = run_ranks_raw(LAST_WORDS, 3, timeout=40)
    assert (listener.code, killed.code, speaker.code) == (5, -9, 3), (listener, killed, speaker)
    assert "rank 2 failed at step 2, forward: no such token" in listener.output
    assert "LEFT []" in listener.output
