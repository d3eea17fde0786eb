"""B39: every rank loads the whole model, or the model is quietly not divided because the process group is not up."""

import torch

from support.memory import PeakMeter
from support.models import Stack
from support.ranks import run_ranks
from support.training import config, group, place

WIDTH, LAYERS = 1024, 24  # 100.8 MB of fp32 weights
UNIT_BYTES = WIDTH * (WIDTH + 1) * 4
MODEL_BYTES = UNIT_BYTES * LAYERS
STATE = ("params", "grads", "master", "optimizer")


def start():
    """Builds and initialises under a meter; (peak bytes, bytes after, what the ledger measured, world)."""
    import shardledger as sl

    meter = PeakMeter()
    with meter:
        with torch.device("meta"):
            model = Stack(WIDTH, LAYERS)
        engine = sl.initialize(model=model, config=config(3))[0]
    held = meter.bytes()
    measured = engine.ledger()["measured"]
    born = engine.module.layers[0].linear.weight.shape
    world = engine.world
    engine.destroy()
    return meter.peak, held, sum(measured[category] for category in STATE), measured["params"], world, tuple(born)


def start_in_a_group():
    with group():
        return start()


def start_without_a_group():
    import torch.distributed as dist

    assert not dist.is_initialized()
    assert place()[1] == 4
    return start()


def check(found, world):
    for rank, (peak, held, states, params, seen, shape) in enumerate(found):
        assert seen == world, "the engine takes the number of ranks from the environment"
        assert shape == (WIDTH, WIDTH)
        assert params <= MODEL_BYTES / world * 1.01
        assert states <= 2 * MODEL_BYTES / world * 1.01, "weights and gradients"
        assert held <= states + 2 * UNIT_BYTES
        assert peak <= states + 2 * UNIT_BYTES + 65536, f"rank {rank}: {peak:,} bytes, a model has {MODEL_BYTES:,}"


def test_a_rank_holds_its_shard_and_one_layer_while_the_model_is_made():
    check(run_ranks(start_in_a_group, 4, timeout=150), 4)


def test_without_a_process_group_one_is_made_and_the_model_is_divided_all_the_same():
    check(run_ranks(start_without_a_group, 4, timeout=150), 4)
