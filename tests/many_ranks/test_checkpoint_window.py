"""A save inside an accumulation window: the run goes on in the middle of the window, here or on other ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch

from support.models import build, data
from support.ranks import run_ranks
from support.training import config, group, place

SAMPLES = 12  # of one window
SAVED_AT, LAST = 16, 30  # samples: in the second window after 4 of 12, and in the third after half of them
CASES: list[tuple[int, str, dict[str, Any]]] = [
    *((stage, "fp32", {}) for stage in range(4)),
    *((stage, "bf16", {}) for stage in (0, 1, 3)),
    (2, "fp16", {}),
    (1, "fp32", {"weighted": True}),
    (3, "fp32", {"no_sync": True}),
    (0, "fp32", {"edited": True}),
    (1, "fp32", {"edited": True}),
    *((stage, "fp32", {"reproducible": True}) for stage in (0, 3)),
    (2, "bf16", {"home": "nvme"}),
    (1, "fp32", {"home": "cpu"}),
]


def start(stage, precision, more, micro=1, seed=0):
    import shardledger as sl

    _, world = place()
    home = {"device": more.get("home", "none"), "nvme_path": tempfile.gettempdir()}
    zero = {"offload_optimizer": home} if "home" in more else {}
    settings = config(stage, optimizer="AdamW", lr=0.05, precision=precision, gradient_clipping=0.5, zero=zero)
    settings |= {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": SAMPLES // (micro * world)}
    settings["fp16"] = {"enabled": precision == "fp16", "initial_scale_power": 6}
    settings["shardledger"] = {"reproducible": more.get("reproducible", False)}
    return sl.initialize(model=build("awkward", seed), config=settings)[0]


def take(engine, more):
    """One micro-batch, by the samples all ranks have seen; returns its loss."""
    rank, world = place()
    micro = engine.train_micro_batch_size_per_gpu()
    first = engine.global_samples % (2 * SAMPLES) + rank * micro
    x, y = (part[first : first + micro].to(next(engine.module.parameters()).dtype) for part in data("awkward", 24))
    loss = engine(x, y)
    engine.backward(loss, denominator=float(1 + engine.micro_steps % 3 + rank) if more.get("weighted") else None)
    if more.get("edited") and engine.global_samples == 14:
        from shardledger.utils import safe_get_full_grad, safe_set_full_grad

        for parameter in engine.module.parameters():  # adds up over ranks in the middle of the window
            gradient = safe_get_full_grad(parameter)
            if gradient is not None:
                safe_set_full_grad(parameter, gradient * 2)
    engine.step()
    return float(loss.detach())


def run(engine, more, until):
    seen = []
    while engine.global_samples < until:
        if more.get("no_sync") and engine.global_samples < LAST - SAMPLES:
            with engine.no_sync():
                seen.append(take(engine, more))
        else:
            seen.append(take(engine, more))
    return seen


def state(engine):
    """Losses apart, what two runs are compared by; the gradient norm is of the window that was cut in two."""
    return {name: value.clone() for name, value in engine.state_dict(all_ranks=True).items()}


def cut_in_two(folder):
    """For each case: a run without a save, one with a save in the window, one that goes on from that."""
    found = []
    with group():
        for number, (stage, precision, more) in enumerate(CASES):
            runs = []
            for saves in (False, True):
                engine = start(stage, precision, more)
                losses = run(engine, more, SAVED_AT)
                if saves:
                    engine.save_checkpoint(folder, str(number))
                losses = run(engine, more, LAST)
                runs.append((losses, engine.get_global_grad_norm(), state(engine), engine.micro_steps))
                engine.destroy()
            engine = start(stage, precision, more, seed=5)
            take(engine, {})  # what the load must drop
            engine.load_checkpoint(folder, str(number))
            runs.append((run(engine, more, LAST), engine.get_global_grad_norm(), state(engine), engine.micro_steps))
            engine.destroy()
            found.append(runs)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("window"))


@pytest.fixture(scope="module")
def outcomes(folder):
    return run_ranks(cut_in_two, 2, folder, timeout=150)


@pytest.mark.parametrize("number", range(len(CASES)), ids=str)
def test_a_window_that_is_cut_in_two_ends_as_if_it_had_not_been(outcomes, number):
    for rank in outcomes:
        whole, saving, resumed = rank[number]
        for other in (saving, resumed):
            assert (other[0], other[1], other[3]) == (whole[0], whole[1], whole[3])
            assert all(torch.equal(other[2][name], value) for name, value in whole[2].items())


def elsewhere(folder, jobs):
    found = []
    with group():
        for number, stage, precision, micro in jobs:
            more = CASES[number][2]
            engine = start(stage, precision, {**more, "reproducible": False}, micro, seed=3)
            try:
                engine.load_checkpoint(folder, str(number))
                run(engine, more, LAST - LAST % SAMPLES)
                found.append((engine.get_global_grad_norm(), state(engine)))
            except Exception as error:
                found.append((f"{type(error).__name__}: {error}", {}))
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 4])
def test_another_world_and_stage_ends_the_window_within_rounding(outcomes, folder, world):
    micro = {1: 4, 4: 1}[world]
    jobs = [(0, 3, "fp32", micro), (1, 2, "fp32", micro), (2, 0, "fp32", micro), (3, 1, "fp32", micro)]
    jobs += [(12, 2, "fp32", micro), (7, 1, "fp32", micro)]  # reproducible to not; fp16 to fp32: no loss scale
    for rank in run_ranks(elsewhere, world, folder, jobs):
        for (number, *_), (norm, weights) in zip(jobs, rank, strict=True):
            whole = outcomes[0][number][0]
            far = 2e-3 if CASES[number][1] == "fp16" else 1e-6
            assert norm == pytest.approx(whole[1], rel=max(far, 1e-5)), number
            for name, value in whole[2].items():
                assert torch.allclose(weights[name], value, atol=far, rtol=0), (number, name)


def test_ranks_that_cannot_stop_at_that_sample_are_told(outcomes, folder):
    for rank in run_ranks(elsewhere, 3, folder, [(0, 0, "fp32", 1)]):
        assert "after 4 of its samples; 3 ranks take 3 at once" in rank[0][0]
