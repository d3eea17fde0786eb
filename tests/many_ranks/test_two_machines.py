"""Two machines, each with an address of its own, joined by a slow link: the same training, and what a lost one leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from support.machines import two_machines, why_not
from support.ranks import run_ranks
from support.tiny_model import source

STEPS = 8
LIMIT_S = 90.0
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "zero_optimization": {"stage": 3},
    "shardledger": {"timeout_s": 6, "checkpoint": {"every": 2}},
}
TRAIN = ["train", "--config", "ds.json", "--model", "tiny:Tiny", "--data", "text.txt", "--seq-len", "16"]
TRAIN += ["--device", "cpu", "--steps", str(STEPS)]


def on_one_host(folder, out, resume=None):
    """The same training on the ranks of one machine."""
    from shardledger.cli.settings import Options, train_settings
    from shardledger.cli.start import start

    before = os.getcwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        options = Options(data="text.txt", steps=STEPS, seed=0, device="cpu", out=out, nproc=None, resume=resume)
        start(train_settings(options, config="ds.json", model="tiny:Tiny", seq_len=16, eval_every=0), TRAIN)
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


@pytest.fixture
def machines():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with two_machines() as pair:
        yield pair


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "tiny.py").write_text(source(width=32))
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return tmp_path


def start(machines, desk, index, out, *more, launcher=(), told=None):
    """The command on one machine."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(told or {})}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "GLOO_SOCKET_IFNAME"):
        environment.pop(name, None)
    with (desk / f"{out}-{index}.log").open("a") as log:
        command = [sys.executable, *launcher, "-m", "shardledger", *TRAIN, "--out", out, *more]
        return machines.start(index, command, cwd=desk, env=environment, stdout=log, stderr=subprocess.STDOUT)


def torchrun(machines, desk, index, out):
    """As the README shows it."""
    where = ["--master-addr", machines.addresses[0], "--master-port", "29500"]
    nodes = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(index)]
    launcher = ["-m", "torch.distributed.run", *nodes, *where]
    return start(machines, desk, index, out, launcher=launcher, told={"NAP": "0.3"})


def srun(machines, desk, index, out, *more):
    """As examples/two_machines.sbatch does."""
    slurm = {"SLURM_PROCID": str(index), "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
    told = {**slurm, "SLURM_STEP_ID": "0", "MASTER_ADDR": machines.addresses[0]}
    return start(machines, desk, index, out, *more, told=told)


def log(desk, out, index=0):
    return (desk / f"{out}-{index}.log").read_text()


def losses(desk, out):
    try:
        lines = (desk / out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if record["event"] == "step"}


def test_a_run_on_two_machines_computes_what_one_host_does_and_survives_the_loss_of_a_machine(machines, desk):
    run_ranks(on_one_host, 2, desk, "one-host")
    expected = losses(desk, "one-host")
    nodes = [torchrun(machines, desk, index, "run") for index in (0, 1)]
    deadline = time.monotonic() + LIMIT_S
    while max(losses(desk, "run"), default=0) < 5:
        assert nodes[0].poll() is None and time.monotonic() < deadline, log(desk, "run")[-3000:]
        time.sleep(0.05)

    machines.link(1, "down")  # before it dies: nobody hears of it, no connection is closed, only silence is left
    machines.kill(1)
    nodes[1].wait(LIMIT_S)
    assert nodes[0].wait(LIMIT_S) == 1
    text = log(desk, "run")
    assert "PeerLostError" in text and "failed at rank 1" in text and "machine cannot be reached" in text, text[-3000:]
    assert machines.sent_bytes(0) > 100_000  # weights and gradients went over the link
    done = losses(desk, "run")
    assert done == {step: expected[step] for step in done}
    assert (desk / "run/checkpoints/latest").read_text() == "step-000004"

    machines.link(1, "up")
    shutil.copytree(desk / "run", desk / "alone")
    again = [srun(machines, desk, index, "run", "--resume") for index in (0, 1)]
    run_ranks(on_one_host, 1, desk, "alone", "latest")
    assert losses(desk, "alone") == pytest.approx(expected, abs=1e-5)
    assert [node.wait(LIMIT_S) for node in again] == [0, 0], log(desk, "run")[-3000:]
    assert losses(desk, "run") == expected


def without_a_shared_folder(folder, asynchronous):
    """Each rank stands somewhere else, as on machines with disks of their own; returns the errors of two saves."""
    import torch

    import shardledger as sl
    from shardledger.checkpoint import shared_folder
    from shardledger.errors import CheckpointError

    shared_folder.PATIENCE_S = 0.3
    rank = int(os.environ["RANK"])
    here = folder / f"machine-{rank}-{asynchronous}"
    here.mkdir()
    before = os.getcwd()
    os.chdir(here)
    found = []
    try:
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "shardledger": {"checkpoint": {"async": asynchronous}},
        }
        engine = sl.initialize(model=torch.nn.Linear(4, 4), config=settings, device="cpu")[0]
        for leftover in (False, True):
            if leftover and rank:
                (here / "ckpt" / ".one.saving").mkdir(parents=True)  # of a crash: it looks like what rank 0 has made
            try:
                engine.save_checkpoint("ckpt", "one")
                engine.checkpoints.wait()
            except CheckpointError as error:
                found.append(str(error))
        if rank == 0:
            (here / "ckpt").mkdir(exist_ok=True)
            shared_folder.PATIENCE_S = 5.0
        published = (here / "ckpt" / "one").exists() or (here / "ckpt" / "latest").exists()
        engine.destroy()
    finally:
        os.chdir(before)
    return found, published


@pytest.mark.parametrize("asynchronous", [False, True])
def test_machines_that_do_not_share_the_folder_are_told_so_and_nothing_is_published(tmp_path, asynchronous):
    for errors, published in run_ranks(without_a_shared_folder, 2, tmp_path, asynchronous):
        assert not published
        assert len(errors) == 2, errors
        assert "rank 1 does not see" in errors[0] and "file system that they share" in errors[0]
        assert "rank 0 does not see it" in errors[1] and "rank 1 has written" in errors[1]
