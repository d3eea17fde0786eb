"""A budget instead of a stage: whatever is chosen for a budget stays under it when every live byte is counted."""

import random

import pytest
import torch

import shardledger as sl
from shardledger.errors import ConfigError, DoesNotFitError
from support.ranks import run_ranks
from support.training import group

SEQ, MICRO, BUDGETS = 32, 4, 30


def make_model():
    """Six blocks, so that a gathered unit and what is under way weigh less than what sharding saves."""
    from shardledger.workload import GPT, GPTConfig

    return GPT(GPTConfig(layers=6, heads=4, width=96, context=SEQ))


def open_config(budget, precision="fp32", recompute=False):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "shardledger": {"memory_budget": budget, "activation_checkpointing": recompute},
    }


def measured_under_budgets(world, precision):
    """For 30 random budgets: what was chosen, and its highest measured moment; choices that repeat are run once."""
    from shardledger.budget import rows_without_offload
    from shardledger.cli.verify import measure
    from shardledger.config import load_config
    from shardledger.forecast import Question
    from shardledger.ledger.choose import cheapest

    config = load_config(open_config("1GiB", precision), world=world)
    question = Question(model=make_model, config=config, world=world, seq_len=SEQ, device="cpu")
    rows = rows_without_offload(question)
    low, high = min(row.total for row in rows), max(row.total for row in rows)
    draw = random.Random(world)
    budgets = [low, high, *(draw.randrange(low, high) for _ in range(BUDGETS - 2))]
    # Budgets that exactly one more byte would break are the hardest.
    budgets += [row.total for row in rows]
    found, peaks = [], {}
    with group():
        for budget in budgets:
            row = cheapest(rows, budget)
            choice = (row.stage, row.checkpointing)
            if choice not in peaks:
                decided = config.decided(stage=row.stage, activation_checkpointing=row.checkpointing)
                reading, engine = measure(question, decided, 3)
                engine.destroy()
                peaks[choice] = reading.total
            found.append((budget, choice, row.total, peaks[choice]))
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_measured_peak_is_under_every_budget(precision):
    for found in run_ranks(measured_under_budgets, 2, 2, precision, timeout=150):
        assert len({choice for _, choice, _, _ in found}) >= 4
        over = [(budget, choice, predicted, peak) for budget, choice, predicted, peak in found if peak > budget]
        assert over == []


def data():
    return [(torch.full((SEQ,), i), torch.full((SEQ,), i + 1)) for i in range(8)]


def train_with_a_budget(budget):
    with group():
        config = open_config(budget, recompute=True)  # what is asked for stays: half the choices
        engine, _, loader, _ = sl.initialize(model=make_model(), config=config, training_data=data(), device="cpu")
        for tokens, targets in loader:
            engine.backward(engine(tokens, targets))
            engine.step()
        outcome = engine.plan.stage, engine.plan.units[1].recompute, engine.config.stage_is_open, engine.global_steps
        engine.destroy()
    return outcome


def test_initialize_decides_from_the_training_data_on_all_ranks_alike():
    assert run_ranks(train_with_a_budget, 2, "9.75MiB", timeout=120) == [(2, True, False, 1)] * 2


def test_without_a_batch_to_plan_with_the_way_out_is_named():
    with pytest.raises(ConfigError, match=r"training_data=.*or choose before with shardledger plan"):
        sl.initialize(model=make_model(), config=open_config("64MiB"), device="cpu")
    with pytest.raises(ConfigError, match="training_data is empty"):
        config = open_config("64MiB")
        sl.initialize(model=make_model(), config=config, training_data=[], device="cpu")


def test_a_budget_that_nothing_meets_is_refused_before_anything_is_built():
    with pytest.raises(DoesNotFitError, match="no stage fits it"):
        sl.initialize(
            model=make_model(), config=open_config("2MiB", recompute=True), training_data=data(), device="cpu"
        )
