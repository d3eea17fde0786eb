"""A budget instead of a stage: whatever is chosen for a budget stays under it when every live byte is counted."""

import random

import pytest
import torch

import shardledger as sl
from shardledger.errors import ConfigError, DoesNotFitError
from support.ranks import run_ranks
from support.training import group

SEQ, MICRO, BUDGETS = 32, 4, 30


def make_small_model():
    from shardledger.workload import GPT, GPTConfig

    return GPT(GPTConfig(layers=4, heads=4, width=96, context=SEQ))


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


def chosen_for_random_budgets(precision, world=2):
    """For 30 random budgets, and those that exactly one more byte would break: (budget, chosen row)."""
    from shardledger.budget import pricing, rows_to_choose_from, units_of
    from shardledger.config import load_config
    from shardledger.forecast import Question, forecast
    from shardledger.ledger.mixed import cheapest_mix

    config = load_config(open_config("1GiB", precision), world=world)
    question = Question(model=make_small_model, config=config, world=world, seq_len=SEQ, device="cpu")
    found = forecast(question)
    rows, price = [row for row in rows_to_choose_from(found) if row.offload == "none"], pricing(question)
    low, high = min(row.total for row in rows), max(row.total for row in rows if row.stage == 2)
    draw = random.Random(precision)
    budgets = [low, high, *(draw.randrange(low, high) for _ in range(BUDGETS - 2)), *(row.total for row in rows)]
    return rows, [(budget, cheapest_mix(rows, budget, units_of(found), price)) for budget in budgets]


def measured_peaks(rows, precision):
    """The highest measured moment of each row when it is run."""
    from shardledger.budget import decided
    from shardledger.cli.verify import measure
    from shardledger.config import load_config
    from shardledger.forecast import Question

    config = load_config(open_config("1GiB", precision), world=2)
    question = Question(model=make_small_model, config=config, world=2, seq_len=SEQ, device="cpu")
    peaks = []
    with group():
        for row in rows:
            reading, engine = measure(question, decided(config, row), 2)
            engine.destroy()
            peaks.append(reading.total)
    return peaks


def test_the_measured_peak_is_under_every_budget():
    from shardledger.ledger.choose import cheapest, cost

    precision = "bf16"
    rows, found = chosen_for_random_budgets(precision)
    unique = list(dict.fromkeys(row for _, row in found))
    assert sum(bool(row.unit_stages) for row in unique) >= 2 and sum(bool(row.recomputed_units) for row in unique) >= 2
    for budget, row in found:
        assert cost(row) <= cost(cheapest(rows, budget))  # never worse than the best choice that is alike for all units
    for peaks in run_ranks(measured_peaks, 2, unique, precision, timeout=150):
        peak_of = dict(zip(unique, peaks, strict=True))
        assert [(budget, row, peak_of[row]) for budget, row in found if peak_of[row] > budget] == []


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
