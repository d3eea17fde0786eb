"""B74: frozen and trainable parameters in the same modules: refused, or gradient memory for frozen weights."""

import pytest
import torch

from support.models import FrozenRegressor, numbers
from support.oracle import largest_difference, make_optimizer, micro_batches, reference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
ADAMW = {"lr": 0.01, "eps": 1e-4, "weight_decay": 0.01}
WIDTH, LAYERS, RANK = 500, 4, 2  # about a million frozen elements and 8,500 trainable ones


def make(width=WIDTH, layers=LAYERS):
    torch.manual_seed(0)
    return FrozenRegressor(width, layers, RANK)


def account():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            settings = config(stage, optimizer="AdamW", optimizer_params=ADAMW)
            x, y = micro_batches(numbers(4, WIDTH), *place(), 1)[0]
            settings["train_micro_batch_size_per_gpu"] = len(x)
            engine, optimizer, _, _ = sl.initialize(model=make(), config=settings)
            for _ in range(2):
                engine.backward(engine(x, y))
                engine.step()
            mine = sum(p.numel() for g in optimizer.param_groups for p in g["params"])
            found[stage] = (engine.ledger(), mine, engine.state_dict())
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_and_moments_are_kept_for_trainable_elements_only(world):
    model = make()
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert frozen > 1e6 and trainable < 2e4
    adamw = make_optimizer("AdamW", **ADAMW)
    right = reference(make(), numbers(4, WIDTH), adamw, steps=2).weights
    slack = 4 * 5 * world * 64 * 4
    for rank, found in enumerate(run_ranks(account, world)):
        for stage, (ledger, mine, weights) in found.items():
            where = f"stage {stage}, rank {rank}, {ledger['measured']}"
            measured = ledger["measured"]
            parts = 1 if stage == 0 else world
            assert measured["optimizer"] <= 8 * trainable / parts + slack, where
            assert measured["grads"] <= 4 * trainable + slack, where
            assert mine <= trainable / parts + slack / 4, where
            held = (frozen + trainable) / (world if stage == 3 else 1)
            assert measured["params"] == pytest.approx(4 * held, rel=0.01), where
            assert {k: ledger["predicted"][k] for k in ("params", "grads", "master", "optimizer")} == {
                k: measured[k] for k in ("params", "grads", "master", "optimizer")
            }, where
            if rank == 0:
                assert largest_difference(weights, right) <= 1e-5, f"stage {stage}"


def thaw(freeze):
    """Change requires_grad after initialize: train on as torch would, or say that it cannot be."""
    import shardledger as sl
    from shardledger.errors import ShardledgerError

    found = {}
    with group(30):
        for stage in STAGES:
            x, y = micro_batches(numbers(12, 9), *place(), 1)[0]
            settings = {**config(stage), "train_micro_batch_size_per_gpu": len(x)}
            engine = sl.initialize(model=make(9, 3), config=settings)[0]
            engine.backward(engine(x, y))
            engine.step()
            try:
                if freeze:
                    engine.module.layers[1].up.requires_grad_(False)
                else:
                    engine.module.layers[1].base.requires_grad_(True)
                for _ in range(2):
                    engine.backward(engine(x, y))
                    engine.step()
                found[stage] = engine.state_dict()
            except ShardledgerError as error:
                found[stage] = str(error)
            engine.destroy()
    return found


@pytest.mark.parametrize("freeze", [True, False])
def test_changing_what_is_trainable_later_works_or_is_refused_by_name(freeze):
    model = make(9, 3)
    batch = numbers(12, 9)
    for step in range(3):
        if step == 1 and freeze:
            model.layers[1].up.requires_grad_(False)
        elif step == 1:
            model.layers[1].base.requires_grad_(True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
    for rank, found in enumerate(run_ranks(thaw, 2, freeze)):
        for stage, outcome in found.items():
            if isinstance(outcome, str):
                name = "layers.1.up" if freeze else "layers.1.base"
                assert name in outcome, f"stage {stage} does not name it: {outcome}"
            elif rank == 0:
                assert largest_difference(outcome, model.state_dict()) <= 1e-6, f"stage {stage}"
