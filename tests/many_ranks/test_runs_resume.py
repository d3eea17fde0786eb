"""Runs of the command line that are stopped or lose ranks, and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from support.ranks import free_port
from support.tiny_model import source

STEPS = 12
CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 20, "warmup_num_steps": 4}},
    "zero_optimization": {"stage": 2},
    "shardledger": {"timeout_s": 20, "checkpoint": {"every": 3, "async": True, "keep_last": 2}},
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.py").write_text(source(width=8))
    (folder / "ds.json").write_text(json.dumps(CONFIG))
    return folder


def command(desk, out, *more, launcher=("-m", "shardledger"), nap="0"):
    arguments = ["train", "--config", "ds.json", "--model", "tiny:Tiny", "--seq-len", "16", "--device", "cpu"]
    arguments += ["--steps", str(STEPS), "--out", out, *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NAP": nap, "GLOO_SOCKET_IFNAME": "lo"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        environment.pop(name, None)
    log = (desk / f"{out}.log").open("a")
    return subprocess.Popen(
        [sys.executable, *launcher, *arguments], cwd=desk, env=environment, stdout=log, stderr=subprocess.STDOUT
    )


def records(desk, out, event="step"):
    try:
        lines = (desk / out / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [record for line in lines if line.endswith("\n") and (record := json.loads(line))["event"] == event]


def wait_for_step(desk, out, step, process, limit=60.0, event="step"):
    deadline = time.monotonic() + limit
    while not any(record["step"] >= step for record in records(desk, out, event)):
        assert process.poll() is None and time.monotonic() < deadline, (desk / f"{out}.log").read_text()[-2000:]
        time.sleep(0.02)


def losses(desk, out):
    return {record["step"]: record["loss"] for record in records(desk, out)}


@pytest.fixture(scope="module")
def uninterrupted(desk):
    assert command(desk, "whole", "--nproc", "1").wait(60) == 0, (desk / "whole.log").read_text()
    return losses(desk, "whole")


def test_sigterm_finishes_the_step_and_saves_and_the_run_goes_on_with_another_number_of_ranks(desk, uninterrupted):
    run = command(desk, "stopped", "--nproc", "2", nap="0.1")
    wait_for_step(desk, "stopped", 4, run)
    run.send_signal(signal.SIGTERM)
    assert run.wait(30) == 143, (desk / "stopped.log").read_text()[-2000:]
    done = records(desk, "stopped")[-1]["step"]
    assert 4 <= done < STEPS
    tag = (desk / "stopped/checkpoints/latest").read_text()
    assert tag == f"step-{done:06d}"
    assert f"after step {done}" in (desk / "stopped.log").read_text()
    assert command(desk, "stopped", "--nproc", "1", "--resume").wait(60) == 0, (desk / "stopped.log").read_text()
    assert losses(desk, "stopped") == pytest.approx(uninterrupted, abs=1e-5)
    assert [r["step"] for r in records(desk, "stopped", "checkpoint_load")] == [done]
    saves = records(desk, "stopped", "checkpoint_save")
    assert saves[-1]["step"] == STEPS and saves[-1]["bytes"] > 0
    kept = sorted(path.name for path in (desk / "stopped/checkpoints").iterdir())
    assert kept == ["latest", "step-000009", "step-000012"]
    rates = [record["lr"] for record in records(desk, "stopped")]
    assert rates == [record["lr"] for record in records(desk, "whole")]


def test_a_killed_rank_and_then_a_lost_node_lead_to_a_resumed_run_without_a_hand(desk, uninterrupted):
    port = free_port()

    def node(hosts):
        rendezvous = f"last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2,is_host={hosts}"
        torchrun = ["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-id", "x", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        torchrun += ["--local-addr", "127.0.0.1", "--rdzv-conf", rendezvous, "-m", "shardledger"]
        return command(desk, "elastic", "--resume", "auto", launcher=torchrun, nap="0.15")

    first, second = node(1), node(0)
    try:
        wait_for_step(desk, "elastic", 5, first)
        psutil.Process(second.pid).children()[0].kill()  # one rank: torchrun starts all ranks again
        wait_for_step(desk, "elastic", 1, first, event="checkpoint_load")
        wait_for_step(desk, "elastic", 7, first)
        for process in (*psutil.Process(second.pid).children(recursive=True), psutil.Process(second.pid)):
            process.kill()
        assert first.wait(90) == 0, (desk / "elastic.log").read_text()[-3000:]
    finally:
        for node_ in (first, second):
            for process in psutil.Process(node_.pid).children(recursive=True) if node_.poll() is None else ():
                process.kill()
            node_.kill()
            node_.wait()
    ranks = [len(record["memory_peak_bytes"]) for record in records(desk, "elastic")]
    assert ranks[0] == 2 and ranks[-1] == 1
    assert len(records(desk, "elastic", "checkpoint_load")) == 2
    assert losses(desk, "elastic") == pytest.approx(uninterrupted, abs=1e-5)
