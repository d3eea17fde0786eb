"""B44, B45: a checkpoint loads on any number of ranks, at any stage and in any precision, with every number what it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.models import build, data
from support.ranks import run_ranks
from support.training import config, group, place

WORLDS, STAGES = (1, 2, 3, 4), (0, 1, 2, 3)
Expected = dict[str, dict[str, Tensor]]  # parameter -> "value" or state -> whole tensor


def settings(stage, precision="fp32"):
    return config(stage, optimizer="AdamW", lr=0.05, precision=precision, train_micro_batch_size_per_gpu=12)


def whole_batch(precision):
    return [p.bfloat16() if precision == "bf16" and p.is_floating_point() else p for p in data("awkward", 12)]


def gathered(engine) -> Expected:
    """Every weight and moment, whole, on rank 0; read by the public accessors, not by what writes checkpoints."""
    from shardledger.utils import safe_get_full_optimizer_state

    values = engine.state_dict()
    found: Expected = {}
    for name, parameter in engine.module.named_parameters():
        states = {key: safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq", "step")}
        found[name] = {key: state.cpu() for key, state in states.items() if state is not None}
        found[name]["value"] = values.get(name, torch.empty(0))
    return found


def save_all(folder, stages, precisions):
    """One checkpoint per stage and precision, and what must come out of it again."""
    import shardledger as sl

    rank, world = place()
    with group():
        for stage, precision in itertools.product(stages, precisions):
            engine = sl.initialize(model=build("awkward"), config=settings(stage, precision))[0]
            for _ in range(2):
                engine.backward(engine(*whole_batch(precision)))
                engine.step()
            assert engine.save_checkpoint(folder, f"{world}-{stage}-{precision}") is True
            expected = gathered(engine)
            with torch.no_grad():
                loss = float(engine(*whole_batch(precision)))
            if rank == 0:
                torch.save((expected, loss), Path(folder) / f"{world}-{stage}-{precision}.expected")
            engine.destroy()


def load_all(folder, tags, stages, precision):
    """Load every checkpoint into one engine per stage, one after the other; compare this rank's part bit by bit."""
    import shardledger as sl

    wrong, held = [], {}
    with group():
        for stage in stages:
            engine = sl.initialize(model=build("awkward", seed=7), config=settings(stage, precision))[0]
            state = engine.checkpoints._state
            for tag in tags:
                path, client = engine.load_checkpoint(folder, tag)
                assert path == str(Path(folder) / tag) and client == {}
                expected, loss = torch.load(Path(folder) / f"{tag}.expected")
                count = 0
                for unit in range(len(engine.plan.units)):
                    for portion, tensor in state.held(unit):
                        key = "value" if portion.role == "master" else portion.role
                        whole = expected[portion.name][key]
                        start, stop = portion.elements.start, portion.elements.stop
                        part = whole if portion.scalar else whole.reshape(-1)[start:stop]
                        count += 1 if portion.scalar else stop - start
                        if not torch.equal(part, tensor):
                            wrong.append((tag, stage, portion))
                held[tag, stage] = count
                with torch.no_grad():
                    again = float(engine(*whole_batch(precision)))
                if precision == tag.rpartition("-")[2] and abs(again - loss) > 1e-6 * max(1, abs(loss)):
                    wrong.append((tag, stage, again, loss))
                engine.backward(engine(*whole_batch(precision)))  # what the next load must undo
                engine.step()
            engine.destroy()
    return wrong, held


def numbers_in(folder, tag) -> int:
    expected, _ = torch.load(Path(folder) / f"{tag}.expected")
    return sum(tensor.numel() for states in expected.values() for tensor in states.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("any-to-any"))
    for world in WORLDS:
        run_ranks(save_all, world, path, STAGES, ("fp32", "bf16") if world == 2 else ("fp32",))
    return path


@pytest.mark.parametrize("world", WORLDS)
def test_every_pair_of_rank_counts_and_stages_gives_weights_and_moments_back_bit_by_bit(folder, world):
    tags = [f"{saved}-{stage}-fp32" for saved in WORLDS for stage in STAGES]
    outcomes = run_ranks(load_all, world, folder, tags, STAGES, "fp32", timeout=120)
    assert [wrong for wrong, _ in outcomes if wrong] == []
    for key in outcomes[0][1]:
        assert sum(held[key] for _, held in outcomes) == numbers_in(folder, key[0]), key


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_may_change_and_masters_and_moments_do_not(folder, precision):
    tags = [f"2-{stage}-{saved}" for stage in STAGES for saved in ("fp32", "bf16")]
    outcomes = run_ranks(load_all, 3, folder, tags, STAGES, precision)
    assert [wrong for wrong, _ in outcomes if wrong] == []
