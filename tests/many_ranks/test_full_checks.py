"""`checks: full` finds replicas that have drifted apart and ranks that do the same work."""

import warnings

import pytest
import torch

from support.models import build
from support.ranks import run_ranks
from support.training import group, place


def _engine(stage, precision="fp32"):
    import shardledger as sl

    keys = {
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "shardledger": {"checks": "full"},
    }
    return sl.initialize(model=build("transformer"), config=keys)[0]


def _train(engine, seed):
    tokens = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
    engine.step()


def drifts():
    import shardledger as sl

    rank, _ = place()
    found = {}
    with group(30):
        for stage in range(3):
            for precision in ("fp32", "bf16"):
                engine = _engine(stage, precision)
                for step in range(2):
                    _train(engine, 10 * step + rank)
                if rank == 1:
                    with torch.no_grad():
                        engine.module.blocks[1].norm.weight[0] += 1.0
                with pytest.raises(sl.RanksDisagreeError) as raised:
                    for step in range(2, 4):
                        _train(engine, 10 * step + rank)
                found[stage, precision] = str(raised.value)
                engine.destroy()
    return found


def test_a_parameter_changed_on_one_rank_is_found_at_the_next_step():
    for found in run_ranks(drifts, 2, timeout=90):
        for message in found.values():
            assert "blocks.1" in message
            assert "rank 1" in message
            assert "step 3" in message


def twins(same):
    rank, _ = place()
    with group(30):
        engine = _engine(3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(3):
                _train(engine, 10 * step + (0 if same else rank))
        engine.destroy()
    return [str(w.message) for w in caught if "same batches" in str(w.message)]


@pytest.mark.parametrize("same", [True, False])
def test_ranks_with_the_same_batches_are_told_once(same):
    for found in run_ranks(twins, 2, same, timeout=60):
        assert len(found) == int(same)
