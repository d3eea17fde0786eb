"""What is left of an engine that was destroyed: no byte, no hook, and no way to compute with what is gone."""

import gc
import tempfile
import weakref

import pytest
import torch
from torch import nn

from shardledger.errors import EngineStateError, ReleasedParameterError
from support.memory import live_bytes
from support.models import build, data
from support.oracle import micro_batches
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


def outlive(wire):
    """Of two engines that share the process group that the first one made, end the first and train the second."""
    import shardledger as sl

    part = micro_batches(data("transformer", 12), *place(), 1)[0]
    settings = {**config(1), "train_micro_batch_size_per_gpu": 6, "shardledger": {"transport": wire}}
    first, second = (sl.initialize(model=build("transformer"), config=settings)[0] for _ in range(2))
    first.destroy()
    for _ in range(2):
        second.backward(second(*part))
        second.step()
    alive = torch.distributed.is_initialized()
    second.destroy()
    return alive, torch.distributed.is_initialized(), second.global_steps


@pytest.mark.parametrize("wire", ["gloo", "shared_memory"])
def test_an_engine_goes_on_when_the_one_that_made_the_process_group_has_ended(wire):
    assert run_ranks(outlive, 2, wire) == [(True, False, 2)] * 2


def start(stage, **more):
    import shardledger as sl

    part = micro_batches(data("transformer", 12), *place(), 1)[0]
    settings = {**config(stage, optimizer="AdamW", accumulation=3, **more), "train_micro_batch_size_per_gpu": 6}
    model = build("transformer")
    return sl.initialize(model=model, config=settings)[0], model, part


def weights_in(model):
    with torch._C.DisableTorchFunctionSubclass():
        return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}.values())


def leave_at(moment, stage, **more):
    """Destroy an engine at a moment of its window -> (bytes beside the model's, bytes at last, who is alive)."""
    engine, model, part = start(stage, **more)
    optimizer = engine.optimizer
    watched = [weakref.ref(thing) for thing in (engine, model, optimizer)]
    for _ in range(4):  # one step, and one micro-batch of the next window
        engine.backward(engine(*part))
        engine.step()
    if moment == "reducing":
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(*part))
        assert engine._parts.executor._reductions, "some reduction is under way"
    if moment == "forward":
        engine(*part)
    engine.destroy()
    beside = live_bytes(collect=False) - weights_in(model)
    del engine, model, optimizer, part
    return beside, live_bytes(collect=False), [thing() is not None for thing in watched]


def leave_without_collecting():
    from shardledger.transport import gloo

    found = []
    with group():
        leave_at("window", 3)
        gc.collect()
        gc.disable()
        try:
            before, batch = live_bytes(collect=False), sum(t.nbytes for t in data("transformer", 12))
            for stage in STAGES:
                for moment in ("window", "reducing", "forward"):
                    found.append((stage, moment, before, batch, *leave_at(moment, stage)))
            found.append((3, "tree", before, batch, *leave_at("window", 3, shardledger={"reproducible": True})))
            found.append((2, "bf16", before, batch, *leave_at("reducing", 2, precision="bf16")))
            disk = {"device": "nvme", "nvme_path": tempfile.gettempdir()}
            for stage, zero in (
                (2, {"offload_optimizer": disk}),
                (3, {"offload_optimizer": disk, "offload_param": disk}),
            ):
                found.append((stage, "disk", before, batch, *leave_at("reducing", stage, zero=zero)))
            found.append((2, "checks", before, batch, *leave_at("window", 2, shardledger={"checks": "full"})))
        finally:
            gc.enable()
        return found, len(gloo._under_way)


def test_every_byte_is_returned_at_once_without_a_garbage_collection():
    for found, messages in run_ranks(leave_without_collecting, 2):
        for stage, moment, before, batch, beside, after, alive in found:
            assert beside - before <= batch, (stage, moment, "an engine that is destroyed holds no tensor")
            assert after == before, (stage, moment)
            assert alive == [False] * 3, (stage, moment, "engine, model, optimizer")
        assert messages == 0, "no message is under way"


def use_what_is_left(stage):
    import shardledger as sl

    with group():
        engine, model, part = start(stage)
        loss = engine(*part)
        weights = engine.state_dict(all_ranks=True)
        optimizer = engine.optimizer
        engine.destroy()
        engine.destroy()  # once more does nothing
        with pytest.raises(EngineStateError, match="engine was destroyed.*before engine.destroy"):
            loss.backward()
        with pytest.raises(EngineStateError, match="engine of this optimizer was destroyed"):
            optimizer.step()
        for call in (engine.step, engine.flush, engine.zero_grad, engine.state_dict, lambda: engine(*part)):
            with pytest.raises(EngineStateError, match="this engine was destroyed"):
                call()
        if stage == 3:
            for use in (lambda: model(*part), lambda: model.head.weight.sum(), lambda: nn.init.zeros_(model.position)):
                with pytest.raises(
                    ReleasedParameterError, match="'(embedding.weight|position)' has no values any more"
                ):
                    use()
            with pytest.raises(EngineStateError, match="'position' has no values.*load_state_dict"):
                sl.initialize(model=model, config=config(stage))
            model.load_state_dict(weights)
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        assert model.head.weight is model.embedding.weight
        assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
        model(*part).backward()
        with pytest.raises(EngineStateError, match="the optimizer given to initialize has no parameters"):
            sl.initialize(model=model, optimizer=optimizer, config=config(stage))
        model.zero_grad()
        again = sl.initialize(model=model, config=config(stage))[0]
        again.backward(again(*part))
        again.step()
        again.destroy()
    return True


@pytest.mark.parametrize("stage", (0, 3))
def test_what_is_left_computes_or_says_what_is_gone(stage):
    assert run_ranks(use_what_is_left, 2, stage) == [True, True]
