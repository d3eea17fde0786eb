"""B35: the peak must not lie in initialize: no flattening copy of the model, no warm-up of optimizer states."""

import itertools

import pytest
import torch

from support.memory import PeakMeter
from support.models import Stack, numbers
from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
WIDTH, LAYERS = 64, 12
UNIT_BYTES = WIDTH * (WIDTH + 1) * 4
SLACK = 16384


def measure(born):
    import shardledger as sl

    found = {}
    with group():
        for stage, precision in itertools.product(STAGES, ("fp32", "bf16")):
            meter = PeakMeter()
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            batch = [part.to(dtype) for part in numbers(1, WIDTH, WIDTH)]
            torch.manual_seed(0)
            with meter:
                with torch.device(born):
                    model = Stack(WIDTH, LAYERS)
                before = meter.bytes()
                meter.peak = 0
                engine = sl.initialize(model=model, config=config(stage, optimizer="AdamW", precision=precision))[0]
                start = meter.peak
                for _ in range(2):
                    meter.peak = 0
                    engine.backward(engine(*batch))
                    engine.step()
                step = meter.peak
                rest = meter.bytes()
            found[stage, precision] = (before, start, step, rest)
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_model_without_memory_never_needs_more_than_its_states_and_one_unit(world):
    for rank, found in enumerate(run_ranks(measure, world, "meta", timeout=120)):
        for key, (_, start, step, rest) in found.items():
            assert start <= rest + UNIT_BYTES + SLACK, f"rank {rank}, {key}: {start} at the start, {rest} at rest"
            assert start <= step + SLACK, f"rank {rank}, {key}: the peak is at initialisation"


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_on_the_cpu_is_taken_over_unit_by_unit(world):
    for rank, found in enumerate(run_ranks(measure, world, "cpu", timeout=120)):
        for key, (before, start, _, rest) in found.items():
            assert before >= LAYERS * UNIT_BYTES, "the meter sees the model"
            assert start <= max(before, rest) + 2 * UNIT_BYTES + SLACK, f"rank {rank}, {key}"
