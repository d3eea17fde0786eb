"""Out of memory, before and after: a plan that cannot fit is refused unbuilt; a run that runs out tells its ledger."""

import sys

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.cli.exits import DOES_NOT_FIT, exit_code
from shardledger.config import load_config
from shardledger.errors import DoesNotFitError
from shardledger.layout.build import build_layout
from shardledger.ledger import OptimizerBytes
from shardledger.ledger.lower_bound import at_least
from shardledger.plan.build import build_plan
from shardledger.runtime.describe import describe
from shardledger.runtime.out_of_memory import asked_bytes, is_out_of_memory
from shardledger.runtime.parameters import FlatParameters
from support.ranks import run_ranks

CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
CPU_MESSAGE = (
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096000 bytes. Error code 12"
)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Four blocks; x[n, width] -> loss."""

    def __init__(self, width=32):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config(stage=0, **own):
    return {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "shardledger": own,
    }


class Fails(torch.autograd.Function):
    """Passes x through; its backward raises ``error``."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


def out_of_memory_at(phase, error, engine, x, monkeypatch):
    """Let one training step fail in a phase."""
    block = engine.module.blocks[2]
    if phase == "forward":
        monkeypatch.setattr(torch, "tanh", lambda _: (_ for _ in ()).throw(error))
    if phase == "backward":
        monkeypatch.setattr(block.linear, "forward", lambda x, f=block.linear.forward: Fails.apply(f(x), error))
    if phase == "step":
        monkeypatch.setattr(type(engine.optimizer), "step", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)) as caught:
        engine.backward(engine(x))
        engine.step()
    monkeypatch.undo()
    return caught.value


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("phase", "kind", "message", "asked"),
    [
        ("forward", torch.OutOfMemoryError, CUDA_MESSAGE, 2 * 2**30),
        ("backward", RuntimeError, CPU_MESSAGE, 4_096_000),
        ("step", MemoryError, "", None),
    ],
)
def test_the_ledger_of_the_moment_is_printed_and_attached_and_the_error_is_the_same(
    stage, phase, kind, message, asked, capsys, monkeypatch
):
    error = kind(message)
    engine = sl.initialize(model=Model(), config=config(stage), device="cpu")[0]
    x = torch.ones(4, 32)
    raised = out_of_memory_at(phase, error, engine, x, monkeypatch)
    assert raised is error  # the very object, so that whoever catches it still does
    shortage = raised.shortage
    units = {"forward": {"blocks.0"}, "backward": {"blocks.2", "blocks.3"}, "step": {"(optimizer)"}}
    assert (shortage.phase, shortage.rank, shortage.step, shortage.asked_bytes) == (phase, 0, 1, asked)
    assert shortage.unit in units[phase]
    expected = shortage.predicted
    assert shortage.live["params"] == expected["params"] == 4 * 32 * 33 * 4
    assert shortage.live["grads"] == expected["grads"]
    assert shortage.live["total"] > 0
    text = capsys.readouterr().err
    assert str(shortage) in text
    assert f"ran out of memory in {phase}" in text and "predicted" in text and "what would help" in text
    whats = [remedy.what for remedy in shortage.remedies]
    if phase != "step":
        assert "halve the micro-batch to 2" in whats and "recompute activations" in whats
    # What failed was cleaned up: training goes on.
    engine.backward(engine(x))
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def bare_backward_that_fails(engine, error, monkeypatch, *, in_a_kernel):
    """loss.backward() without the engine: memory runs out in an operator of autograd, or in a gather of the engine."""
    block = engine.module.blocks[2]
    if in_a_kernel:
        monkeypatch.setattr(block.linear, "forward", lambda x, f=block.linear.forward: Fails.apply(f(x), error))
    loss = engine(torch.ones(4, 32))
    if not in_a_kernel:
        monkeypatch.setattr(FlatParameters, "allocate", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(type(error)) as caught:
        loss.backward()
    monkeypatch.undo()
    assert caught.value is error


def test_a_gather_that_fails_under_a_bare_backward_is_told_at_once(capsys, monkeypatch):
    engine = sl.initialize(model=Model(), config=config(3), device="cpu")[0]
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    bare_backward_that_fails(engine, error, monkeypatch, in_a_kernel=False)
    assert error.shortage.phase == "backward" and error.shortage.unit in ("(root)", "blocks.3")  # gathered ahead
    assert "recompute activations" in capsys.readouterr().err
    loss = engine(torch.ones(4, 32))  # the broken pass is cleaned up, training goes on
    loss.backward()
    engine.step()
    assert engine.was_step_applied()
    engine.destroy()


def test_what_fails_in_autograds_own_operators_under_a_bare_backward_is_told_when_nobody_catches_it(
    capsys, monkeypatch
):
    engine = sl.initialize(model=Model(), config=config(), device="cpu")[0]
    error = RuntimeError(CPU_MESSAGE)
    bare_backward_that_fails(engine, error, monkeypatch, in_a_kernel=True)
    assert not hasattr(error, "shortage")
    sys.excepthook(type(error), error, error.__traceback__)
    assert error.shortage.phase == "backward" and error.shortage.unit in ("blocks.2", "blocks.3")
    text = capsys.readouterr().err
    assert text.index("ran out of memory in backward") < text.index("Traceback")
    engine.destroy()


def test_memory_that_runs_out_in_initialize_is_told_with_what_the_states_need(capsys, monkeypatch):
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    monkeypatch.setattr("shardledger.api.assemble", lambda *_: (_ for _ in ()).throw(error))
    with pytest.raises(torch.OutOfMemoryError) as caught:
        sl.initialize(model=Model(512), config=config(), device="cpu")
    assert caught.value is error
    shortage = error.shortage
    assert (shortage.phase, shortage.step, shortage.asked_bytes) == ("initialize", 0, 2 * 2**30)
    assert shortage.predicted["params"] == 4 * 512 * 513 * 4
    text = capsys.readouterr().err
    assert "rank 0 ran out of memory in initialize; 2.0 GiB more were asked for" in text and "what would help" in text


def test_other_errors_pass_untold(capsys, monkeypatch):
    engine = sl.initialize(model=Model(), config=config(), device="cpu")[0]
    raised = out_of_memory_at("forward", RuntimeError("shape mismatch"), engine, torch.ones(4, 32), monkeypatch)
    assert not hasattr(raised, "shortage")
    assert capsys.readouterr().err == ""
    engine.destroy()


def test_an_error_while_telling_does_not_hide_the_error_it_tells_about(monkeypatch):
    engine = sl.initialize(model=Model(), config=config(), device="cpu")[0]
    monkeypatch.setattr("shardledger.runtime.account.state_census", lambda *_: 1 / 0)
    error = torch.OutOfMemoryError(CUDA_MESSAGE)
    assert out_of_memory_at("forward", error, engine, torch.ones(4, 32), monkeypatch) is error
    engine.destroy()


def test_a_real_allocation_that_fails_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
    assert asked_bytes(caught.value) == 4 * 10**15
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))


def test_a_plan_that_cannot_fit_is_refused_with_the_bytes_and_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("shardledger.api.assemble", lambda *_: pytest.fail("the engine was assembled"))
    width = 512
    numel = 4 * width * (width + 1)
    with torch.device("meta"):
        model = Model(width)
    with pytest.raises(DoesNotFitError) as caught:
        sl.initialize(model=model, config=config(0, device_memory="8MiB"), device="cpu")
    message = str(caught.value)
    assert exit_code(caught.value) == DOES_NOT_FIT
    assert f"{16 * numel / 2**20:.1f} MiB" in message and "8.0 MiB (shardledger.device_memory)" in message
    assert "missing" in message and "what would help" in message


def test_a_plan_that_fits_is_not_refused():
    width = 512
    bound = 16 * 4 * width * (width + 1) + 4 * 4 * 2 * 2 * 4  # states, and a step counter for each parameter
    for memory, fits in ((bound - 1000, False), (bound + 1000, True)):
        try:
            engine = sl.initialize(model=Model(width), config=config(0, device_memory=memory), device="cpu")[0]
        except DoesNotFitError:
            assert not fits
        else:
            engine.destroy()
            assert fits


def test_with_training_data_the_whole_step_is_foreseen_and_without_it_only_what_no_batch_could_save():
    width, samples = 512, 256
    memory = 16 * 4 * width * (width + 1) + 2**20  # states, and a MiB for activations that take several
    settings = {**config(0, device_memory=memory), "train_micro_batch_size_per_gpu": samples}
    data = [torch.zeros(width)] * samples
    with pytest.raises(DoesNotFitError) as caught:
        sl.initialize(model=Model(width), config=settings, training_data=data, device="cpu")
    message = str(caught.value)
    assert "is predicted to need" in message and "in backward" in message
    assert "halve the micro-batch" in message and "activations" in message
    sl.initialize(model=Model(width), config=settings, device="cpu")[0].destroy()
    roomy = {**settings, "shardledger": {"device_memory": memory + 16 * 2**20}}
    sl.initialize(model=Model(width), config=roomy, training_data=data, device="cpu")[0].destroy()


def test_states_that_rest_elsewhere_do_not_count_against_the_device():
    spec = describe(Model(64))
    settings = {**config(1), "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    away = {**settings, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    numel = 4 * 64 * 65
    for content, one_memory, less in ((settings, False, 0), (away, False, 16 * numel), (away, True, 0)):
        plan = build_plan(load_config(content), spec, world=1)
        row = at_least(plan, build_layout(plan, spec), OptimizerBytes(8, 0, states=(4, 4)), 0, one_memory=one_memory)
        assert row.total == 20 * numel - less  # masters, moments and summed gradients are away


def refused_on_this_rank():
    found = {}
    for stage in (0, 3):
        try:
            sl.initialize(model=Model(512), config=config(stage, device_memory="15MiB"), device="cpu")[0].destroy()
            found[stage] = ""
        except DoesNotFitError as error:
            found[stage] = str(error)
    return found


def test_all_ranks_refuse_and_the_remedies_name_the_stage_that_fits():
    for found in run_ranks(refused_on_this_rank, 2, timeout=60):
        assert "stage 0 cannot fit" in found[0]
        # 16.0 MiB at stage 0; 8.0 and a unit at stage 3.
        first = found[0].partition("what would help:\n")[2].splitlines()[0]
        assert "enough alone" in first and first.startswith("  1. stage 1 ")
        assert found[3] == ""
