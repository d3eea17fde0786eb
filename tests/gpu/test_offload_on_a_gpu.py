"""Offload on one GPU: what leaves the device, what crosses the link, and that it crosses while the device computes.

Skipped without a GPU.
"""

import pytest
import torch

import shardledger as sl
from shardledger.workload import GPT, GPTConfig, loss_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU"),
    pytest.mark.timeout(360),
]

SHAPE = GPTConfig(layers=6, heads=8, width=512, context=128)
CHOICES = {
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    "cpu, unpinned": {"offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "cpu, cpu": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}


def start(stage, zero, precision="bf16"):
    torch.manual_seed(0)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
    }
    return sl.initialize(model=GPT(SHAPE), config=settings, device="cuda")[0]


def steps(engine, count):
    source = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(2 * count):
        tokens = torch.randint(0, 256, (2, 129), generator=source).cuda()
        loss = loss_of(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return losses


def run(stage, zero, count=3):
    engine = start(stage, zero)
    losses = steps(engine, count)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    ledger, traffic = engine.ledger(), engine.tier_traffic()
    engine.destroy()
    del engine
    torch.cuda.empty_cache()
    return losses, held, ledger, traffic


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_trains_alike_and_frees_what_the_ledger_says(stage, tmp_path):
    choices = {name: zero for name, zero in CHOICES.items() if stage == 3 or "offload_param" not in zero}
    choices["disk"] = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    plain, held, ledger, _ = run(stage, {})
    for name, zero in choices.items():
        losses, less, found, traffic = run(stage, zero)
        assert losses == pytest.approx(plain, rel=2e-2), name  # the host's kernel rounds otherwise than the device's
        states = sum(ledger["predicted"][c] - found["predicted"][c] for c in ("params", "grads", "master", "optimizer"))
        assert held - less == pytest.approx(states, rel=0.02), name
        assert found["measured"]["master"] == found["measured"]["optimizer"] == 0, name
        assert traffic["host"]["read_bytes"] > 0 and traffic["host"]["written_bytes"] > 0, name


def test_gradients_cross_the_link_while_backward_computes():
    engine = start(2, CHOICES["cpu"])
    steps(engine, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        steps(engine, 1)
        torch.cuda.synchronize()
    spans = [(e.time_range.start, e.time_range.end, e.name) for e in trace.events()]
    copies = [span for span in spans if "Memcpy DtoH" in span[2] and span[1] - span[0] > 1]
    kernels = [span for span in spans if "Memcpy" not in span[2] and "Memset" not in span[2]]
    beside = [c for c in copies if any(k[0] < c[1] and c[0] < k[1] for k in kernels)]
    assert copies and beside, "no copy to the host ran beside a kernel"
    engine.destroy()


def test_only_buffers_under_way_are_page_locked():
    for name, pinned in (("cpu", True), ("cpu, unpinned", False)):
        engine = start(3, CHOICES[name])
        steps(engine, 1)
        parts = engine._live()
        link = parts.offload.link
        buffers = [link._free.get() for _ in range(link._free.qsize())]
        assert {buffer.is_pinned() for buffer in buffers} == {pinned}
        masters = [flat.master for unit in parts.units for flat in unit.flats if flat.master is not None]
        assert masters and not any(master.is_pinned() for master in masters)
        for buffer in buffers:
            link._free.put(buffer)
        engine.destroy()


def test_states_sent_away_free_the_device_and_come_back():
    engine = start(2, {})
    plain = steps(engine, 2)
    held = torch.cuda.memory_allocated()
    engine.offload_states()
    assert torch.cuda.memory_allocated() < held / 10
    engine.reload_states()
    assert torch.cuda.memory_allocated() == held
    engine.destroy()
    engine = start(2, {})
    assert steps(engine, 1) == plain[:2]
    engine.destroy()
