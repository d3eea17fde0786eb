"""What to change when it does not fit: every remedy's bytes are those of the row it leads to, the cheapest first."""

from dataclasses import replace

from shardledger.ledger.remedies import listing, remedies, table
from support.rows import GIB, rows_of


def row_of(rows, stage, *, offload="none", checkpointing=False, micro_batch=8):
    wanted = (stage, offload, checkpointing, micro_batch)
    return next(r for r in rows if (r.stage, r.offload, r.checkpointing, r.micro_batch) == wanted)


def named(found, word):
    (remedy,) = [r for r in found if word in r.what]
    return remedy


def test_every_saving_is_the_difference_to_the_row_it_leads_to():
    rows = rows_of(7e9, 8, activations=20, micro_batches=(8, 4))
    row = row_of(rows, 1)
    found = remedies(row, rows, 40 * GIB)
    assert named(found, "halve the micro-batch").saves_bytes == 10 * GIB
    assert named(found, "recompute").saves_bytes == row.total - row_of(rows, 1, checkpointing=True).total
    assert named(found, "stage 2").saves_bytes == row.total - row_of(rows, 2).total
    assert named(found, "stage 3").saves_bytes == row.total - row_of(rows, 3).total
    after = row_of(rows, 1, offload="optimizer:cpu")
    assert named(found, "offload optimizer:cpu").saves_bytes == row.total - after.total
    assert not any(remedy.estimated for remedy in found)


def test_those_that_are_enough_alone_come_first_and_the_cheapest_of_them_leads():
    rows = rows_of(7e9, 8, activations=20, micro_batches=(8, 4))
    row = row_of(rows, 1)  # 59.6 GiB
    found = remedies(row, rows, 50 * GIB)
    enough = [remedy.suffices for remedy in found]
    assert enough == sorted(enough, reverse=True) and any(enough)
    whats = [remedy.what for remedy in found if remedy.suffices]
    assert whats[0] == "stage 2"  # sends nothing more
    assert whats.index("halve the micro-batch to 4") < whats.index("recompute activations") < whats.index("stage 3")
    for remedy in found:
        assert remedy.suffices == (row.total - remedy.saves_bytes <= 50 * GIB)


def test_where_none_is_enough_the_largest_saving_leads():
    rows = rows_of(70e9, 8, activations=20, micro_batches=(8, 4))
    found = remedies(row_of(rows, 0), rows, 10 * GIB)
    assert not any(remedy.suffices for remedy in found)
    assert [r.saves_bytes for r in found] == sorted((r.saves_bytes for r in found), reverse=True)


def test_a_remedy_that_saves_nothing_is_not_offered():
    rows = rows_of(7e9, 8, activations=0, micro_batches=(8, 4))
    found = remedies(row_of(rows, 3), rows, GIB)
    assert all(remedy.saves_bytes > 0 for remedy in found)
    assert not any("micro-batch" in remedy.what or "recompute" in remedy.what for remedy in found)


def test_micro_batch_1_cannot_be_halved_and_recomputation_not_be_switched_on_twice():
    rows = rows_of(7e9, 8, activations=20, micro_batches=(1,))
    found = remedies(row_of(rows, 1, checkpointing=True, micro_batch=1), rows, GIB)
    assert not any("micro-batch" in remedy.what or "recompute" in remedy.what for remedy in found)


def test_without_other_rows_savings_are_estimates_and_say_so():
    rows = rows_of(7e9, 8, activations=34)
    row = replace(row_of(rows, 2), communication=GIB)
    found = remedies(row, (), 30 * GIB, buckets_numel=2**28)
    assert all(remedy.estimated for remedy in found)
    assert named(found, "recompute").saves_bytes == 32 * GIB  # all but a layer's input: 2 of 34 bytes
    assert named(found, "micro-batch").saves_bytes == 17 * GIB
    assert named(found, "buckets").saves_bytes == 2**28
    assert "saves about 32.0 GiB" in listing(found)


def test_the_table_adds_up_and_names_what_is_missing():
    row = row_of(rows_of(7e9, 8, activations=20), 1)
    text = table(row, 40 * GIB)
    assert "missing" in text and "19.6 GiB" in text and "activations" in text
    assert "missing" not in table(row, 80 * GIB)
    assert "no remedy" in listing(())
