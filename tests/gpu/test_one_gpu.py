"""What only a GPU shows, with one of them: NCCL's collectives, CUDA's allocator, streams. Skipped without one."""

import pytest
import torch
import torch.distributed as dist

import shardledger as sl
from shardledger.workload import GPT, GPTConfig, loss_of
from support.ranks import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
    pytest.mark.timeout(360),
]

SHAPE = GPTConfig(layers=4, heads=4, width=256, context=128)


def config(stage, precision="fp32"):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
    }


def train(stage, device, precision="fp32", steps=4):
    torch.manual_seed(0)
    engine = sl.initialize(model=GPT(SHAPE), config=config(stage, precision), device=device)[0]
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 256, (2, 129), generator=source).to(device)
        loss = loss_of(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    sent = engine.communication()["training"]
    engine.destroy()
    return losses, sent


@pytest.fixture
def nccl(monkeypatch):
    """A process group of one rank over NCCL, and engines that use its collectives although there is nobody to talk to."""
    from shardledger.transport.native import NativeTransport

    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    monkeypatch.setattr(sl.api, "join", lambda place, device, *a, **k: (NativeTransport(None, device), False))
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_stage_trains_as_on_the_cpu(precision):
    expected, _ = train(0, "cpu", precision)
    for stage in range(4):
        losses, _ = train(stage, "cuda", precision)
        assert losses == pytest.approx(expected, rel=2e-4 if precision == "fp32" else 2e-2)


def test_stages_over_nccl_give_the_bits_of_stages_without_messages(nccl):
    for stage in range(4):
        over_nccl, sent = train(stage, "cuda")
        assert sum(kind["calls"] for kind in sent.values()) > 0
        assert over_nccl == train(0, "cuda")[0]


def test_the_allocator_s_peak_is_what_the_plan_says():
    plan = sl.plan(lambda: GPT(SHAPE), config(0), world_size=1, micro_batch=2, seq_len=128)
    rows = {row.stage: row.total for row in plan.rows if row.offload == "none" and not row.checkpointing}
    train(0, "cuda")  # cuBLAS takes its workspace, which stays
    for stage in range(4):
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        train(stage, "cuda")
        measured = torch.cuda.max_memory_allocated() - kept
        # Blocks are rounded up to 512 bytes, and kernels take workspaces: the model is small, so 5 %.
        assert rows[stage] == pytest.approx(measured, rel=0.05), f"stage {stage}"


def test_memory_on_the_device_does_not_grow_from_step_to_step():
    torch.manual_seed(0)
    engine = sl.initialize(model=GPT(SHAPE), config=config(3), device="cuda")[0]
    tokens = torch.randint(0, 256, (2, 129), device="cuda")
    seen = []
    for _ in range(6):
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
        torch.cuda.synchronize()
        seen.append(torch.cuda.memory_allocated())
    engine.destroy()
    assert len(set(seen[2:])) == 1, seen
