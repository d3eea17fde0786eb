"""B48, B49: whatever happens during a save, the last complete checkpoint loads and the next save works."""

from __future__ import annotations

import errno
import os
import shutil
import time
import traceback
from pathlib import Path

import pytest
import torch

from support.faulty_files import DIED, FaultyFiles
from support.models import build, data
from support.oracle import micro_batches
from support.ranks import free_port, run_ranks
from support.training import config, group, place

#: Times that a rank is killed at each step of the protocol; SHARDLEDGER_KILL_ROUNDS=20 is what a release takes.
ROUNDS = int(os.environ.get("SHARDLEDGER_KILL_ROUNDS", "8"))
EVERY = int(os.environ.get("SHARDLEDGER_KILL_EVERY", "3"))
"""Of two ranks, one is killed at every third step of rank 0 and at every second of rank 1; 1: at every step of both."""
SURVIVED, WRONG = 7, 13  # exit codes
LIMIT_S = 10.0


def start(timeout=20.0, asynchronous=False):
    import shardledger as sl

    os.fsync = lambda handle: None  # a killed process loses nothing that a disk would have kept

    rank, world = place()
    part = micro_batches(data("regressor", 12), rank, world, 1)[0]
    settings = {**config(2, optimizer="AdamW"), "train_micro_batch_size_per_gpu": len(part[0])}
    settings["shardledger"] = {"timeout_s": timeout, "checkpoint": {"async": asynchronous}}
    return sl.initialize(model=build("regressor"), config=settings)[0], part


def step(engine, part):
    engine.backward(engine(*part))
    engine.step()


def forked(function, *arguments) -> int:
    """Run in a child process that shares nothing with this one from now on; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        function(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(WRONG)
    os._exit(0)


def code_of(child: int, limit: float = 60.0) -> int:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return -1


def prepared(folder) -> list[str]:
    """A complete checkpoint "one", one "two" that the next save replaces; the steps of that save."""
    engine, part = start()
    step(engine, part)
    engine.save_checkpoint(folder, "two")
    step(engine, part)
    engine.save_checkpoint(folder, "one")
    step(engine, part)
    copy = f"{folder}-dry"
    engine.checkpoints.files = files = FaultyFiles(copy)
    engine.save_checkpoint(copy, "two")
    files.steps.clear()
    engine.save_checkpoint(copy, "two")
    engine.destroy()
    return files.steps


def save_and_die(folder, fail_at, moment, asynchronous):
    engine, part = start(asynchronous=asynchronous)
    for _ in range(3):
        step(engine, part)
    save_with(engine, FaultyFiles(folder, fail_at, moment), folder)


def resumes(folder, engine, part, *, on=True) -> int:
    """Load the latest checkpoint, train (`on`) and save again; returns the step it resumed at."""
    path, _ = engine.load_checkpoint(folder)
    resumed = engine.global_steps
    assert {"one": [2], "two": [1, 3]}[Path(path).name.strip(".").removesuffix(".replaced")].count(resumed) == 1
    if not on:
        return resumed
    step(engine, part)
    engine.save_checkpoint(folder, "two")
    assert sorted(p.name for p in Path(folder).iterdir()) == ["latest", "one", "two"]
    assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "two")
    return resumed


def copied(source, target):
    shutil.copytree(source, target, copy_function=os.link)  # files of a checkpoint are never written to again
    return str(target)


def save_with(engine, files, folder):
    engine.checkpoints.files = files
    engine.save_checkpoint(folder, "two")
    engine.checkpoints.wait()


def kill_alone(base):
    """One rank, killed ROUNDS times at every step of the protocol, before it and in the middle of it."""
    steps = prepared(base)
    saving, reading = (start(), start(asynchronous=True)), start()
    for engine_and_part in saving * 3:
        step(*engine_and_part)
    resumed: dict[str, set[int]] = {}
    for fail_at in dict.fromkeys(steps):
        for round_ in range(ROUNDS):
            folder = copied(base, Path(base).parent / f"{steps.index(fail_at)}-{round_}")
            for _ in range(1 + (round_ == 4)):  # what a crash has left must not hurt a second crash
                files = FaultyFiles(folder, fail_at, ("before", "torn")[round_ % 2])
                code = code_of(forked(save_with, saving[round_ // 2 % 2][0], files, folder))
            assert code == DIED or round_ == 4, (fail_at, code)
            resumed.setdefault(fail_at, set()).add(resumes(folder, *reading, on=round_ < 6))
            shutil.rmtree(folder)
    return steps, resumed


def test_one_rank_killed_at_every_step_of_a_save_always_resumes(tmp_path):
    steps, resumed = run_ranks(kill_alone, 1, str(tmp_path / "base"), timeout=170)[0]
    assert len(steps) > 12, steps
    assert set(resumed) == set(steps)
    assert set().union(*resumed.values()) == {2, 3}, "some crashes come before the new checkpoint counts, some after"


def dies(folder, port, fail_at, moment, who, asynchronous):
    """The body of one rank of a two-rank run in which rank `who` is killed."""
    os.environ["MASTER_PORT"] = str(port)
    rank, _ = place()
    began = time.monotonic()
    try:
        if rank == who:
            save_and_die(folder, fail_at, moment, asynchronous)
        engine, part = start(asynchronous=asynchronous)
        for _ in range(3):
            step(engine, part)
        began = time.monotonic()
        engine.save_checkpoint(folder, "two")
        engine.checkpoints.wait()
    except Exception as error:
        named = f"rank {who}" in str(error)
        os._exit(SURVIVED if named and time.monotonic() - began < LIMIT_S else WRONG)


def alone(folder, target):
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    Path(target).write_text(str(resumes(folder, *start())))


def base_of_two(base, port):
    os.environ["MASTER_PORT"] = str(port)
    steps = prepared(base)
    torch.save(steps, f"{base}.steps{place()[0]}")


def kill_together(base, ports):
    """Two ranks; every second or third step of each rank's protocol once, by kill -9 of real processes."""
    rank, _ = place()
    assert code_of(forked(base_of_two, base, ports.pop())) == 0
    outcomes = []
    for who in (0, 1):
        while not Path(f"{base}.steps{who}").exists():
            time.sleep(0.01)
        steps = list(dict.fromkeys(torch.load(f"{base}.steps{who}")))
        for number, fail_at in enumerate(steps[:: max(1, EVERY - who)]):
            folder = f"{base}-{who}-{number}"
            if rank == 0:
                copied(base, f"{folder}.tmp")
                os.rename(f"{folder}.tmp", folder)
            while not Path(folder).exists():
                time.sleep(0.002)
            how = ("before", "torn")[number % 2], who, bool(number // 2 % 2)
            code = code_of(forked(dies, folder, ports.pop(), fail_at, *how))
            resumed = None
            Path(f"{folder}.ended{rank}").write_text("")
            while not Path(f"{folder}.ended{1 - rank}").exists():
                time.sleep(0.002)
            if rank == 0:
                assert code_of(forked(alone, folder, f"{folder}.step")) == 0, fail_at
                resumed = int(Path(f"{folder}.step").read_text())
            outcomes.append((who, fail_at, code, resumed))
    return outcomes


def test_when_one_of_two_ranks_is_killed_the_other_names_it_and_one_rank_resumes(tmp_path):
    ports = [free_port() for _ in range(100)]
    ranks = run_ranks(kill_together, 2, str(tmp_path / "base"), ports, timeout=170)
    assert {who for who, *_ in ranks[0]} == {0, 1} and len(ranks[0]) > 8
    for rank, outcomes in enumerate(ranks):
        for who, fail_at, code, resumed in outcomes:
            assert code == (DIED if rank == who else SURVIVED), (who, fail_at, rank, code)
            assert rank or resumed in (2, 3), (who, fail_at, resumed)


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def failing(folder):
    """Two ranks; at each step of each rank the disk is full. What each rank was told, and what is left."""
    rank, _ = place()
    found = []
    with group():
        prepared(folder)
        engine, part = start()
        for _ in range(3):
            step(engine, part)
        for who in (0, 1):
            engine.checkpoints.files = files = FaultyFiles(f"{folder}-trace")
            engine.save_checkpoint(f"{folder}-trace", "two")
            files.steps.clear()
            engine.save_checkpoint(f"{folder}-trace", "two")
            names = engine.checkpoints._transport.exchange(torch.tensor([float(len(files.steps))]), "steps")
            for number in range(int(names[who, 0])):
                fail_at = files.steps[number] if rank == who else ""
                engine.checkpoints.files = FaultyFiles(folder, fail_at, ("before", "torn")[number % 2], full_disk)
                try:
                    engine.save_checkpoint(folder, "two")
                    text = ""
                except Exception as error:
                    text = f"{type(error).__name__}: {error}"
                engine.checkpoints.files = FaultyFiles(folder)
                loaded = engine.load_checkpoint(folder)[0]
                found.append((who, fail_at, text, Path(loaded).name, engine.global_steps))
                engine.load_checkpoint(f"{folder}-trace", "two")
        engine.checkpoints.files = FaultyFiles(folder)
        engine.save_checkpoint(folder, "two")
        engine.destroy()
    return found


def test_a_full_disk_on_one_rank_is_the_same_error_on_all_and_leaves_the_last_checkpoint(tmp_path):
    first, second = run_ranks(failing, 2, str(tmp_path / "run"), timeout=120)
    for (who, step0, text0, loaded, steps), (_, step1, text1, _, _) in zip(first, second, strict=True):
        at = step0 or step1
        assert text0 == text1, at
        if "remove" in at and "replaced" in at:
            continue  # the new checkpoint is complete; what is left of the old one is removed by the next save
        assert f"rank {who}" in text0 and "No space left on device" in text0 and "CheckpointError" in text0, at
        assert (loaded, steps) in {("one", 2), ("two", 3)}, at
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["latest", "one", "two"]


def read_only(folder):
    with group():
        engine, part = start()
        step(engine, part)
        with pytest.raises(Exception, match="save_checkpoint failed on all ranks") as caught:
            engine.save_checkpoint(Path(folder) / "file" / "below")
        engine.destroy()
        return str(caught.value)


def test_a_folder_that_cannot_be_written_is_one_error_on_all_ranks(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    first, second = run_ranks(read_only, 2, str(tmp_path))
    assert first == second
    assert "Not a directory" in first and str(tmp_path) in first


def only_rank_zero(folder, calls):
    rank, _ = place()
    engine, part = start(timeout=2.0)
    step(engine, part)
    began = time.monotonic()
    try:
        if rank == 0:
            engine.save_checkpoint(folder)
        elif calls == "trains on":
            step(engine, part)
        else:
            time.sleep(3)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - began


@pytest.mark.parametrize("calls", ["nothing", "trains on"])
def test_a_save_that_only_rank_zero_calls_ends_within_the_timeout_and_says_so(tmp_path, calls):
    (text, seconds), _ = run_ranks(only_rank_zero, 2, str(tmp_path / "run"), calls)
    assert seconds < LIMIT_S
    assert "save_checkpoint" in text and "every rank must call it" in text and "rank 1" in text
    assert not (tmp_path / "run").exists()
