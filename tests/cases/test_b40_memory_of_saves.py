"""B36, B40: a save holds one unit twice at most, a load reads what it needs, and neither leaves anything behind."""

from __future__ import annotations

import torch

from support.memory import PeakMeter, live_bytes
from support.models import Stack, build, data
from support.ranks import run_ranks
from support.training import config, group, place

WIDTH, LAYERS = 256, 8
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4


def repeated_saves(folder):
    import shardledger as sl

    settings = {**config(3, optimizer="AdamW"), "train_micro_batch_size_per_gpu": 6}
    with group():
        engine = sl.initialize(model=build("regressor"), config=settings)[0]
        seen = []
        for number in range(30):
            engine.backward(engine(*data("regressor", 12)))
            engine.step()
            if number % 5 == 4:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder)
                seen.append(live_bytes())
        engine.destroy()
    return seen


def test_memory_does_not_grow_with_saves_and_loads(tmp_path):
    for seen in run_ranks(repeated_saves, 2, str(tmp_path)):
        assert seen[1] == seen[-1], seen


def one_of_many(folder, save):
    import shardledger as sl

    rank, world = place()
    settings = {**config(3, optimizer="AdamW"), "train_micro_batch_size_per_gpu": 2}
    with group():
        torch.manual_seed(rank)
        engine = sl.initialize(model=Stack(WIDTH, LAYERS), config=settings)[0]
        if save:
            x = torch.randn(2, WIDTH)
            engine.backward(engine(x, x))
            engine.step()
        with PeakMeter() as meter:
            if save:
                engine.save_checkpoint(folder)
            else:
                engine.load_checkpoint(folder)
        extra = meter.peak - meter.bytes()
        report = engine.checkpoints.last_load
        engine.destroy()
    return extra, report.elements_read if report else None


def test_a_save_or_load_takes_less_than_one_unit_beside_the_states_and_a_rank_reads_its_own_part(tmp_path):
    for extra, _ in run_ranks(one_of_many, 2, str(tmp_path), True):
        assert extra <= UNIT_BYTES
    everything = 3 * UNIT_BYTES // 4 * LAYERS
    for world in (2, 3):
        loads = run_ranks(one_of_many, world, str(tmp_path), False)
        assert sum(read for _, read in loads) == everything
        for extra, read in loads:
            assert extra <= UNIT_BYTES
            assert read <= everything / world + LAYERS * 3 * 8 * world
