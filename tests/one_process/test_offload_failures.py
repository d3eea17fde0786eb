"""Disks that fail, steps that are interrupted, states that are away: no wrong number comes of it, and no byte stays."""

import errno
import gc
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import shardledger as sl
import shardledger.transport.disk as disk
from shardledger import utils
from shardledger.errors import ConfigError, EngineStateError
from shardledger.transport.disk import AlignedBuffer, DiskFile, TierTraffic
from shardledger.transport.disk_folder import _make, remove_with


def start(stage=3, home=None, folder="", **more):
    torch.manual_seed(0)
    section = {"device": home, **({"nvme_path": folder} if home == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": section} if home else {})},
        **more,
    }
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))
    return sl.initialize(model=model, config=config, device="cpu")[0]


def train(engine, steps):
    for _ in range(steps):
        engine.backward(engine(torch.ones(3, 7)).square().mean())
        engine.step()


def failing_once(call):
    """The n-th call fails, those after it do not."""
    left = [2]

    def fails(*args):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return call(*args)

    return fails


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_after_one_failure_of_the_disk_nothing_is_trained_read_or_saved(call, tmp_path, monkeypatch):
    engine = start(home="nvme", folder=tmp_path)
    train(engine, 1)
    with monkeypatch.context() as patch, pytest.raises(EngineStateError, match="optimizer.bin at byte .* is lost"):
        patch.setattr(os, call, failing_once(getattr(os, call)))
        train(engine, 3)
    weight = next(engine.module.parameters())
    for use in (
        lambda: train(engine, 1),
        engine.state_dict,
        lambda: engine.save_checkpoint(tmp_path / "saved"),
        lambda: utils.safe_get_full_optimizer_state(weight, "exp_avg"),
        lambda: engine.module(torch.ones(3, 7)),
    ):
        with pytest.raises(EngineStateError, match="optimizer.bin at byte .* is lost"):
            use()
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_where_the_file_system_has_neither_direct_writes_nor_reservation_bytes_come_back_all_the_same(
    tmp_path, monkeypatch
):
    refuse = OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    first = [refuse]
    write = os.pwritev

    def refuse_once(*args):
        if first:
            raise first.pop()
        return write(*args)

    def no_reservation(*args):
        raise refuse

    monkeypatch.setattr(os, "pwritev", refuse_once)
    monkeypatch.setattr(os, "posix_fallocate", no_reservation)
    file = DiskFile(tmp_path / "states.bin", 3 * disk.SECTOR, TierTraffic())
    assert not file.direct and not first
    out, back = AlignedBuffer(2 * disk.SECTOR), AlignedBuffer(2 * disk.SECTOR)
    out.tensor.random_(0, 256)
    file.write(disk.SECTOR, out, 0, 2 * disk.SECTOR).wait()
    file.read(disk.SECTOR, back, 0, 2 * disk.SECTOR).wait()
    assert torch.equal(out.tensor, back.tensor)
    file.close()


def test_files_have_no_name_so_that_a_killed_run_leaves_no_bytes(tmp_path):
    engine = start(home="nvme", folder=tmp_path)
    (folder,) = tmp_path.iterdir()
    assert list(folder.iterdir()) == []
    train(engine, 2)
    engine.destroy()
    assert list(tmp_path.iterdir()) == []


def test_empty_folders_of_runs_that_were_killed_go_and_all_others_stay(tmp_path):
    made = _make(tmp_path, "nvme_path", 0)
    host = made.name.split(f"-{os.getpid()}-")[0]
    names = ["999999999-rank0-old", "999999999-rank0-used", "999999999-rank0-new", f"{os.getpid()}-rank1-old"]
    old, used, new, alive = (tmp_path / f"{host}-{name}" for name in names)
    for folder in (old, used, new, alive):
        folder.mkdir()
    (used / "theirs").write_text("kept")
    hour_ago = time.time() - 3600
    for folder in (old, used, alive, made):
        os.utime(folder, (hour_ago, hour_ago))
    another = _make(tmp_path, "nvme_path", 0)
    assert set(tmp_path.iterdir()) == {used, new, alive, made, another}


def test_a_forked_child_that_ends_takes_nothing_away(tmp_path):
    class Owner:
        pass

    owner = Owner()
    remove_with(owner, tmp_path / "mine")
    (tmp_path / "mine").mkdir()
    child = os.fork()
    if not child:
        del owner
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "mine").is_dir()
    del owner
    gc.collect()
    assert not (tmp_path / "mine").exists()


@pytest.mark.parametrize("home", [None, "nvme"])
def test_gradients_of_an_interrupted_step_do_not_come_into_the_next_one(home, tmp_path):
    weights = []
    for interrupted in (False, True):
        engine = start(home=home, folder=tmp_path)
        train(engine, 2)
        if interrupted:

            def interrupt(*_):
                raise KeyboardInterrupt

            handle = engine.optimizer.register_step_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                train(engine, 1)
            handle.remove()
        train(engine, 2)
        weights.append(engine.state_dict())
        engine.destroy()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("stage", [0, 3])
def test_states_that_are_away_are_not_reached_past_the_engine_either(stage, tmp_path):
    engine = start(stage)
    train(engine, 1)
    weights = engine.state_dict()
    weight = next(engine.module.parameters())
    loss = engine(torch.ones(3, 7)).square().mean()
    engine.offload_states(device="nvme", nvme_path=str(tmp_path))
    for use in (
        lambda: engine.module(torch.ones(3, 7)),
        loss.backward,
        lambda: utils.safe_get_full_fp32_param(weight),
        lambda: utils.safe_get_full_optimizer_state(weight, "exp_avg"),
        sl.GatheredParameters([weight]).__enter__,
    ):
        with pytest.raises(EngineStateError, match="reload_states"):
            use()
    engine.reload_states()
    train(engine, 1)
    weights = engine.state_dict()
    engine.offload_states("lp_params")
    module = engine.module
    engine.destroy()
    if stage == 0:
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert list(tmp_path.iterdir()) == []


def test_states_that_cannot_be_brought_back_are_not_trained_on(tmp_path, monkeypatch):
    engine = start(2)
    train(engine, 1)
    engine.offload_states(["optim_states"], device="nvme", nvme_path=str(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(EngineStateError, match="is lost"):
        patch.setattr(os, "preadv", failing_once(os.preadv))
        engine.reload_states()
    with pytest.raises(EngineStateError, match="sent away"):
        train(engine, 1)
    engine.destroy()


def test_the_folder_may_be_a_path_and_must_be_named(tmp_path):
    start(1, "nvme", Path(tmp_path)).destroy()
    with pytest.raises(ConfigError, match="nvme_path is missing"):
        start(1, "nvme", "")
