"""B49: `if rank == 0: save` ends within the timeout, says that every rank must call it and which one did not."""

from __future__ import annotations

import time

import pytest

from support.models import build, data
from support.ranks import run_ranks
from support.training import config, place

TIMEOUT_S = 1.5


def alone(folder, call, stage, then):
    import shardledger as sl

    rank, _ = place()
    settings = {**config(stage, optimizer="AdamW"), "train_micro_batch_size_per_gpu": 6}
    settings["shardledger"] = {"timeout_s": TIMEOUT_S}
    engine = sl.initialize(model=build("regressor"), config=settings)[0]
    engine.backward(engine(*data("regressor", 12)))
    engine.step()
    began = time.monotonic()
    try:
        if rank == 0:
            engine.save_checkpoint(folder) if call == "save_checkpoint" else engine.state_dict()
        elif then == "trains on":
            engine.backward(engine(*data("regressor", 12)))
            engine.step()
        else:
            time.sleep(2 * TIMEOUT_S)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - began


@pytest.mark.parametrize(
    ("call", "stage", "then"),
    [("save_checkpoint", 0, "trains on"), ("state_dict", 3, "trains on"), ("state_dict", 1, "nothing")],
)
def test_what_rank_zero_alone_saves_is_an_error_that_names_the_others(tmp_path, call, stage, then):
    (text, seconds), (other, _) = run_ranks(alone, 2, str(tmp_path / "run"), call, stage, then)
    assert seconds < 10 * TIMEOUT_S
    assert call in text and "every rank must" in text, text
    assert "rank 1" in text or "ranks 0 and 1" in text, text
    assert then == "nothing" or "0" in other, other
    assert not (tmp_path / "run").exists()
