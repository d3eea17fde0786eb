"""B67: rank 0 has 5 batches, rank 1 has 4: both are told at the first missing step, in training and in evaluation."""

import pytest

from support.models import build, data
from support.oracle import micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

NEVER_REACHED_S = 30.0


def run_out_of_batches(stage, phase, then):
    """The error of this rank: its type, text and seconds since the last step that all ranks took."""
    import time

    import torch

    import shardledger as sl

    rank, world = place()
    part = micro_batches(data("transformer", 12), rank, world, 1)[0]
    with group(NEVER_REACHED_S):
        settings = {**config(stage), "train_micro_batch_size_per_gpu": len(part[0])}
        engine = sl.initialize(model=build("transformer"), config=settings)[0]
        start = 0.0
        try:
            for batch in range(5 if rank == 0 else 4):
                start = time.monotonic() if batch < 4 else start
                if phase == "train":
                    engine.backward(engine(*part))
                    engine.step()
                else:
                    with torch.no_grad():
                        engine(*part)
            if then == "save":
                engine.state_dict()
            engine.destroy()
        except sl.ShardledgerError as error:
            return type(error).__name__, str(error), time.monotonic() - start
    return "none", "no error", 0.0


@pytest.mark.parametrize(
    ("stage", "phase", "then"),
    [
        (0, "train", "end"),
        (1, "train", "save"),
        (2, "train", "end"),
        (3, "train", "end"),
        (3, "train", "save"),
        (3, "evaluate", "end"),
        (3, "evaluate", "save"),
    ],
)
def test_the_first_missing_step_is_named_on_both_ranks(stage, phase, then):
    for rank, (error, text, seconds) in enumerate(run_ranks(run_out_of_batches, 2, stage, phase, then)):
        assert error == "RanksDisagreeError", text
        assert f"Got from rank {1 - rank}" in text and "same number of batches" in text
        if phase == "train":
            assert "at step 5, " in text, text
        if then == "end":
            assert "the end of the engine" in text
        assert seconds < NEVER_REACHED_S, "only the timeout ended it"


def pass_with_flush(lengths):
    """An epoch of unequal lengths inside one accumulation window, closed by ``flush``."""
    import shardledger as sl

    rank, world = place()
    part = micro_batches(data("transformer", 12), rank, world, 1)[0]
    with group(NEVER_REACHED_S):
        settings = {
            **config(2, accumulation=4),
            "train_micro_batch_size_per_gpu": len(part[0]),
            "train_batch_size": 4 * world * len(part[0]),
        }
        engine = sl.initialize(model=build("transformer"), config=settings)[0]
        try:
            for _ in range(lengths[rank]):
                engine.backward(engine(*part))
                engine.step()
            engine.flush()
        except sl.RanksDisagreeError as error:
            return str(error)
        finally:
            engine.destroy()
    return "no error"


def test_flush_after_unequal_numbers_of_micro_batches_is_an_error_and_no_wrong_average():
    for text in run_ranks(pass_with_flush, 2, (3, 2), timeout=120):
        assert "rank" in text and text != "no error"
