"""A budget instead of a stage: fewest bytes sent, then least recomputation, then the lowest stage."""

import random
from dataclasses import replace

import pytest

from shardledger.errors import DoesNotFitError
from shardledger.ledger.choose import cheapest, choice
from support.rows import GIB, rows_of

ROWS = rows_of(7e9, 8, activations=20)  # stage 0 to 3: 138, 60, 47, 34 GiB; with recomputation 18 less


@pytest.mark.parametrize(
    ("gib", "stage", "recompute"),
    # In bf16 stage 0 gathers sums in fp32: it sends 6 bytes a parameter where stages 1 and 2 send 4, and is never cheapest.
    [(140, 1, False), (130, 1, False), (60, 1, False), (50, 2, False), (45, 1, True), (30, 2, True), (20, 3, True)],
)
def test_the_cheapest_that_fits(gib, stage, recompute):
    row = cheapest(ROWS, gib * GIB)
    assert (row.stage, row.checkpointing, row.offload) == (stage, recompute, "none")


def test_offload_to_host_memory_comes_after_everything_that_stays_on_the_device():
    # Stage 3 with recomputation needs 15.5 GiB; with masters and moments away 4.1, with the parameters too 2.5.
    chosen = [cheapest(ROWS, int(gib * GIB)).offload for gib in (15.6, 15.4, 4.2, 4.1, 2.6)]
    assert chosen == ["none", "optimizer:cpu", "optimizer:cpu", "optimizer:cpu+param:cpu", "optimizer:cpu+param:cpu"]


def test_the_sentence_names_the_next_cheaper_one():
    text = choice(cheapest(ROWS, 30 * GIB), ROWS, 30 * GIB)
    assert "stage 2, activations recomputed" in text and "predicted peak 28.6 GiB in backward" in text
    assert "the next cheaper, stage 1, activations recomputed, micro-batch 8, would need 41.6 GiB" in text
    assert "next cheaper" not in choice(cheapest(ROWS, 200 * GIB), ROWS, 200 * GIB)


def test_no_row_over_the_budget_is_ever_chosen():
    draw = random.Random(0)
    for _ in range(200):
        rows = [replace(row, total=draw.randrange(1, 100), sent_bytes_per_step=draw.randrange(3)) for row in ROWS]
        budget = draw.randrange(1, 100)
        runnable = [row for row in rows if "nvme" not in row.offload]
        try:
            chosen = cheapest(rows, budget)
        except DoesNotFitError:
            assert min(row.total for row in runnable) > budget
        else:
            assert chosen.total <= budget
            fitting = [row for row in runnable if row.total <= budget]
            assert (chosen.offload == "none") == any(row.offload == "none" for row in fitting)
            assert chosen.sent_bytes_per_step == min(
                row.sent_bytes_per_step for row in fitting if row.offload == chosen.offload
            )


def test_when_nothing_fits_the_leanest_is_shown_with_remedies():
    with pytest.raises(DoesNotFitError) as error:
        cheapest(ROWS, 2 * GIB)
    text = str(error.value)
    assert (
        "stage 3, offload optimizer:cpu+param:cpu, activations recomputed" in text
        and "missing" in text
        and "halve the micro-batch" in text
    )
