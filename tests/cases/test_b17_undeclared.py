"""B17: experts that not every rank uses, undeclared. Exact where no weight is gathered, else named on every rank at once."""

import pytest

from cases.test_b17_declared import OPTIONS, calls_of, make, routes, train_dense
from support.models import numbers
from support.oracle import largest_difference, micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

NEVER_REACHED_S = 30.0
"""Timeout of the group; the error must come long before it."""


def train_undeclared(name, kind, stages):
    """By stage: the weights after four steps, or the error's type, text and seconds."""
    import time

    import shardledger as sl

    found = {}
    rank, world = place()
    part = micro_batches(numbers(12, 4), rank, world, 1)[0]
    with group(NEVER_REACHED_S):
        for stage in stages:
            settings = config(stage, optimizer="SGD", optimizer_params=OPTIONS["SGD"])
            settings["train_micro_batch_size_per_gpu"] = len(part[0])
            engine = sl.initialize(model=make(name), config=settings)[0]
            start = time.monotonic()
            try:
                for step in range(4):
                    engine.backward(engine(*part, routes(kind, rank, len(part[0]), step), calls_of(kind, rank)))
                    engine.step()
                found[stage] = engine.state_dict()
            except sl.ShardledgerError as error:
                found[stage] = (type(error).__name__, str(error), time.monotonic() - start)
            engine.destroy()
    return found


@pytest.mark.parametrize("kind", ["by rank", "mixed", "moving"])
def test_stages_that_gather_nothing_in_forward_train_undeclared_experts_exactly(kind):
    right = train_dense("model", kind, "SGD", 2)
    for stage, weights in run_ranks(train_undeclared, 2, "model", kind, (0, 1, 2))[0].items():
        assert not isinstance(weights, tuple), weights
        assert largest_difference(weights, right) <= 2e-6, f"stage {stage}"


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["by rank", "moving"])
def test_stage_3_names_module_rank_step_and_both_collectives(kind, world):
    ranks = run_ranks(train_undeclared, world, "model", kind, (3,), timeout=120)
    for rank, found in enumerate(ranks):
        error, text, seconds = found[3]
        assert error in ("RanksDisagreeError", "PeerLostError"), text
        assert "unit mixture.experts." in text and "step 1, " in text, text
        assert "set_z3_leaf_modules" in text or error == "PeerLostError", text
        assert seconds < NEVER_REACHED_S, "only the timeout ended it"
        if error == "RanksDisagreeError":
            assert f"Expected by rank {rank} at step 1" in text and "Got from rank " in text
    assert any(found[3][0] == "RanksDisagreeError" for found in ranks)
