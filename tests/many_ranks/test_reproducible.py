"""With ``reproducible`` the result depends on the global batch: not on stage, bucket, home or number of ranks."""

import hashlib

import pytest
import torch

from support.models import build
from support.ranks import run_ranks
from support.training import group

VIRTUAL_RANKS = 4
"""Micro-batches of a global batch: 1 rank x 4, 2 x 2 or 4 x 1."""


def _one(stage, precision, bucket):
    import os

    import shardledger as sl

    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    accumulation = VIRTUAL_RANKS // world
    keys = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.1,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "shardledger": {"reproducible": True},
    }
    torch.manual_seed(0)
    engine = sl.initialize(model=build("transformer"), config=keys)[0]
    norms = []
    for step in range(10):
        numbers = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (VIRTUAL_RANKS, 2, 7), generator=numbers)
        for micro in range(accumulation):
            batch = tokens[micro * world + rank]
            engine.backward(engine(batch[:, :-1], batch[:, 1:]))
            engine.step()
        norms.append(engine.get_global_grad_norm())
        assert engine.get_clip_coefficient() < 1.0
    account = engine.ledger()
    for category in ("params", "grads", "master", "optimizer"):
        assert account["predicted"][category] == account["measured"][category], category
    weights = engine.state_dict(all_ranks=True)
    digest = hashlib.sha256(b"".join(w.contiguous().numpy().tobytes() for w in weights.values())).hexdigest()
    engine.destroy()
    return digest, norms


def digests(precision, stages, bucket):
    with group(60):
        return [_one(stage, precision, bucket) for stage in stages]


@pytest.mark.parametrize(("precision", "stages"), [("fp32", (0, 1, 2, 3)), ("bf16", (1, 3))])
def test_ten_clipped_adamw_steps_are_bit_equal_at_one_two_and_four_ranks_and_every_stage(precision, stages):
    seen = set()
    for world, bucket in ((1, 5e8), (2, 64), (4, 5e8)):
        for found in run_ranks(digests, world, precision, stages, bucket, timeout=120):
            seen |= {(digest, *norms) for digest, norms in found}
    assert len(seen) == 1


def refusals():
    import shardledger as sl

    keys = {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "shardledger": {"reproducible": True},
    }
    with group(30), pytest.raises(sl.PlanError, match="needs 1, 2, 4, 8"):
        sl.initialize(model=build("transformer"), config=keys)
    return True


def test_three_ranks_are_refused_by_name():
    assert run_ranks(refusals, 3, timeout=60) == [True] * 3


def no_sync():
    import shardledger as sl

    keys = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "shardledger": {"reproducible": True}}
    engine = sl.initialize(model=build("transformer"), config=keys)[0]
    try:
        with pytest.raises(sl.EngineStateError, match="reproducible"), engine.no_sync():
            pass
    finally:
        engine.destroy()
    return True


def test_no_sync_is_refused_by_name():
    assert run_ranks(no_sync, 1, timeout=60) == [True]
