"""A budget met unit by unit: against every possible choice, and never over."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardledger.errors import DoesNotFitError
from shardledger.ledger.choose import choice, cost
from shardledger.ledger.mixed import Mix, cheapest_mix
from shardledger.ledger.recommend import describe
from support.rows import rows_of

BLOCKS = ("blocks.0", "blocks.1", "blocks.2", "blocks.3")
UNITS = ("(root)", *BLOCKS)
SENT = {0: 60, 1: 60, 2: 60, 3: 90}
"""A block's 6 saved bytes a unit when it is whole at stage 3: five units, 30 bytes."""
TEMPLATE = rows_of(1e9, 8, activations=1)[0]


def priced(mix: Mix, weights: int, activations: int) -> object:
    """A step of equal blocks. The root is gathered all the time, so that keeping it whole costs nothing."""
    whole = sum(label != "(root)" for label in mix.lowered)
    if mix.stage < 3:
        whole = len(BLOCKS)
    total = (
        100 + whole * weights + (len(BLOCKS) - len(mix.recomputed)) * activations + {0: 300, 1: 100}.get(mix.stage, 0)
    )
    return replace(
        TEMPLATE,
        stage=mix.stage,
        checkpointing=bool(mix.recomputed),
        total=total,
        sent_bytes_per_step=SENT[mix.stage] - (6 * len(mix.lowered) if mix.stage == 3 else 0),
        unit_stages=tuple(mix.unit_stages.items()),
        recomputed_units=() if len(mix.recomputed) == len(BLOCKS) else mix.recomputed,
    )


def alike(weights, activations):
    choices = product(range(4), ((), BLOCKS))
    return [
        replace(priced(Mix(stage=s, lowered_stage=s, lowered=(), recomputed=r), weights, activations), unit_stages=())
        for s, r in choices
    ]


def every_mixture(weights, activations):
    for lowered, kept in product(range(len(UNITS) + 1), range(len(BLOCKS) + 1)):
        order = ("(root)", *reversed(BLOCKS))[:lowered]
        yield priced(Mix(stage=3, lowered_stage=2, lowered=order, recomputed=BLOCKS[kept:]), weights, activations)
        yield priced(Mix(stage=2, lowered_stage=2, lowered=(), recomputed=BLOCKS[kept:]), weights, activations)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.integers(100, 600))
def test_no_mixture_within_the_budget_is_cheaper_than_the_one_that_is_found(weights, activations, budget):
    asked = []

    def price(mix):
        asked.append(mix)
        return priced(mix, weights, activations)

    found = cheapest_mix(alike(weights, activations), budget, UNITS, price)
    within = [
        row for row in (*every_mixture(weights, activations), *alike(weights, activations)) if row.total <= budget
    ]
    assert found.total <= budget
    assert cost(found)[:3] == min(cost(row)[:3] for row in within)
    assert len(asked) <= 16


def test_a_larger_budget_never_sends_more():
    sent = [
        cheapest_mix(alike(30, 20), budget, UNITS, lambda mix: priced(mix, 30, 20)).sent_bytes_per_step
        for budget in range(100, 400)
    ]
    assert sent == sorted(sent, reverse=True) and set(sent) == {84, 78, 72, 66, 60}


def test_what_is_chosen_for_which_unit_is_said():
    row = cheapest_mix(alike(30, 20), 135, UNITS, lambda mix: priced(mix, 30, 20))
    text = choice(row, alike(30, 20), 135)
    assert describe(row) == "stage 3, 2 units ((root), blocks.3) at stage 2, activations recomputed, micro-batch 8"
    assert describe(row) in text and "the next cheaper" in text


def test_when_not_even_a_whole_root_helps_the_leanest_row_is_shown():
    with pytest.raises(DoesNotFitError, match="no stage fits it"):
        cheapest_mix(alike(30, 20), 90, UNITS, lambda mix: priced(mix, 30, 20))


def test_a_root_whose_shard_is_saved_when_it_is_whole_can_be_what_makes_it_fit():
    def leaner(mix):
        row = priced(mix, 30, 20)
        return replace(row, total=row.total - 5 * ("(root)" in mix.lowered))

    row = cheapest_mix(alike(30, 20), 97, UNITS, leaner)
    assert row.unit_stages == (("(root)", 2),) and row.total == 95


def test_a_model_without_blocks_is_chosen_as_a_whole():
    row = cheapest_mix(alike(30, 20), 100, ("(root)",), lambda mix: pytest.fail("there is nothing to mix"))
    assert (row.stage, row.checkpointing) == (3, True)


def test_recomputation_that_was_asked_for_stays():
    rows = [row for row in alike(30, 20) if row.checkpointing]
    row = cheapest_mix(rows, 1000, UNITS, lambda mix: priced(mix, 30, 20))
    assert row.checkpointing and not row.recomputed_units


def test_offload_comes_last_and_only_where_nothing_else_fits():
    away = replace(alike(30, 20)[0], offload="optimizer:cpu", total=80)
    disk = replace(away, offload="optimizer:nvme", total=10)
    rows = [away, disk, *alike(30, 20)]
    for budget, offload in ((100, "none"), (99, "optimizer:cpu"), (80, "optimizer:cpu")):
        assert cheapest_mix(rows, budget, UNITS, lambda mix: priced(mix, 30, 20)).offload == offload
    with pytest.raises(DoesNotFitError):  # a disk would need a folder, which nobody has named
        cheapest_mix(rows, 79, UNITS, lambda mix: priced(mix, 30, 20))
