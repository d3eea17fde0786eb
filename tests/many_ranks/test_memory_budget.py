"""A budget instead of a stage: whatever is chosen for a budget stays under it when every live byte is counted."""

import random

import pytest
import torch

import shardledger as sl
from shardledger.errors import ConfigError, DoesNotFitError
from support.ranks import run_ranks
from support.training import group

SEQ, MICRO, BUDGETS = 32, 2, 30


def open_config(budget, precision):
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": {"stage": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "shardledger": {"memory_budget": budget},
    }


def measured_under_budgets(world, precision):
    """For 30 random budgets: what was chosen, and its highest measured moment; choices that repeat are run once."""
    from shardledger.budget import rows_without_offload
    from shardledger.cli.verify import measure
    from shardledger.config import load_config
    from shardledger.forecast import Question
    from shardledger.ledger.choose import cheapest

    config = load_config(open_config("1GiB", precision), world=world)
    question = Question(model="gpt:1m", config=config, world=world, seq_len=SEQ, device="cpu")
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
    from shardledger.workload import load_model

    with group():
        engine, _, loader, _ = sl.initialize(
            model=load_model("gpt:1m", SEQ), config=open_config(budget, "fp32"), training_data=data(), device="cpu"
        )
        for tokens, targets in loader:
            engine.backward(engine(tokens, targets))
            engine.step()
        stage = engine.plan.stage, engine.plan.units[1].recompute, engine.config.stage_is_open, engine.global_steps
        engine.destroy()
    return stage


def test_initialize_decides_from_the_training_data_on_all_ranks_alike():
    loose, tight = (run_ranks(train_with_a_budget, 2, budget, timeout=90) for budget in ("64MiB", "9MiB"))
    assert loose == [(1, False, False, 2)] * 2  # stage 1 sends the least: it gathers what it has updated, once
    assert tight[0] == tight[1] and tight[0][0] == 3 and tight[0][2:] == (False, 2)


def test_without_a_batch_to_plan_with_the_way_out_is_named():
    from shardledger.workload import load_model

    with pytest.raises(ConfigError, match=r"training_data=.*or choose before with shardledger plan"):
        sl.initialize(model=load_model("gpt:1m", SEQ), config=open_config("64MiB", "fp32"), device="cpu")
    with pytest.raises(ConfigError, match="training_data is empty"):
        config = open_config("64MiB", "fp32")
        sl.initialize(model=load_model("gpt:1m", SEQ), config=config, training_data=[], device="cpu")


def test_a_budget_that_nothing_meets_is_refused_before_anything_is_built():
    from shardledger.workload import load_model

    with pytest.raises(DoesNotFitError, match="no stage fits it"):
        sl.initialize(
            model=load_model("gpt:1m", SEQ), config=open_config("2MiB", "fp32"), training_data=data(), device="cpu"
        )
