"""Asynchronous saves, and loaders with a position of their own, on two ranks."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from shardledger.checkpoint.files import Files
from support.models import build, data
from support.ranks import run_ranks
from support.training import config, group, place


class SlowFiles(Files):
    """The disk of one rank: it waits to be let go, and then fails if it is to."""

    def __init__(self, fails):
        self.go = threading.Event()
        self.fails = fails

    def write_parts(self, path, tensors):
        assert self.go.wait(20)
        if self.fails:
            raise OSError(28, "No space left on device", str(path))
        super().write_parts(path, tensors)


def start():
    import shardledger as sl

    settings = {**config(3, optimizer="AdamW"), "train_micro_batch_size_per_gpu": 6}
    settings["shardledger"] = {"checkpoint": {"async": True}, "timeout_s": 30}
    return sl.initialize(model=build("regressor"), config=settings)[0]


def step(engine):
    engine.backward(engine(*data("regressor", 12)))
    engine.step()


def slow_rank_one(folder, fails):
    rank, _ = place()
    with group():
        engine = start()
        step(engine)
        saved = engine.state_dict(all_ranks=True)
        engine.checkpoints.files = disk = SlowFiles(fails) if rank == 1 else Files()
        engine.save_checkpoint(folder, "then")
        for _ in range(3):
            step(engine)
        early = (Path(folder) / "latest").exists()
        if rank == 1:
            disk.go.set()
        text, steps = "", 0
        try:
            while engine.checkpoints.pending and steps < 5000:
                step(engine)
                steps += 1
        except Exception as error:
            text = str(error)
        engine.checkpoints.files = Files()
        trained_on = engine.global_steps
        engine.save_checkpoint(folder, "last")
        engine.destroy()  # publishes it
        engine = start()
        path, _ = engine.load_checkpoint(folder)
        resumed = engine.global_steps
        same = None
        if not fails:
            engine.load_checkpoint(folder, "then")
            now = engine.state_dict(all_ranks=True)
            same = all(torch.equal(now[name], saved[name]) for name in saved)
        engine.destroy()
        return early, text, Path(path).name, trained_on, resumed, same


def test_training_goes_on_until_the_slowest_rank_has_written_and_then_all_publish(tmp_path):
    first, second = run_ranks(slow_rank_one, 2, str(tmp_path), False)
    early, text, name, trained_on, resumed, same = first
    assert first == second
    assert (early, text, name, same) == (False, "", "last", True)
    assert trained_on == resumed


def test_an_error_of_one_ranks_writer_comes_up_on_all_at_the_same_step(tmp_path):
    first, second = run_ranks(slow_rank_one, 2, str(tmp_path), True)
    assert first == second
    early, text, name, trained_on, resumed, _ = first
    assert not early and "rank 1: No space left on device" in text
    assert (name, resumed) == ("last", trained_on)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last", "latest"]


class OwnPosition:
    """A loader whose position is each rank's own."""

    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at, "generator": torch.arange(self.at)}

    def load_state_dict(self, state):
        self.at = state["at"]
        assert torch.equal(state["generator"], torch.arange(self.at))


def own_positions(folder, save):
    rank, _ = place()
    with group():
        engine = start()
        engine.training_dataloader = loader = OwnPosition(10 + rank if save else 0)
        if save:
            step(engine)
            engine.save_checkpoint(folder)
        else:
            before = engine.state_dict(all_ranks=True)
            try:
                engine.load_checkpoint(folder)
            except Exception:
                now = engine.state_dict(all_ranks=True)
                assert all(torch.equal(now[name], before[name]) for name in now), "a refused load changed weights"
                raise
        engine.destroy()
    return loader.at


def test_any_loader_with_a_state_dict_is_asked_and_told_on_each_rank(tmp_path):
    run_ranks(own_positions, 2, str(tmp_path), True)
    assert run_ranks(own_positions, 2, str(tmp_path), False) == [10, 11]
    with pytest.raises(AssertionError, match=r"OwnPosition has a position of its own on each of 2 ranks"):
        run_ranks(own_positions, 1, str(tmp_path), False)
