"""B38: host memory of offload took almost twice its states, pinned although told not to, and the device's grew."""

import itertools

import pytest
import torch
from torch import nn

import shardledger as sl
import shardledger.api

STATES = 4 + 4 + 8
"""Bytes per parameter of sum, master and moments."""


class OddSized(nn.Module):
    """Three parameters of 2**k + 1 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(2**k + 1)) for k in (15, 16, 17))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((w * x.to(w.dtype)).float().square().mean() for w in self.weights)  # type: ignore[return-value]


def held(tensors, seen):
    fresh = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(nbytes for key, nbytes in fresh.items() if key not in seen)


@pytest.mark.parametrize("pin", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_host_bytes_are_the_states_and_a_little_staging(stage, pin, monkeypatch):
    monkeypatch.setattr(shardledger.api, "_is_host_memory", lambda device: False)
    homes = {"offload_optimizer": {"device": "cpu", "pin_memory": pin}}
    if stage == 3:
        homes["offload_param"] = {"device": "cpu", "pin_memory": pin}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, **homes},
    }
    engine = sl.initialize(model=OddSized(), config=settings, device="cpu")[0]
    for _ in range(4):
        engine.backward(engine(torch.ones(1)))
        engine.step()
    parts = engine._live()
    flats = [flat for unit in parts.units for flat in unit.flats]
    states = [t for state in engine.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    weights = {flat.full.untyped_storage()._cdata for flat in flats}
    tensors = list(itertools.chain((f.master for f in flats), (f.shard for f in flats), states))
    sums = [g.reduced for unit in parts.units for g in unit.gradients if g.sum_is_away]
    link = parts.offload.link
    staging = [link._free.get() for _ in range(link._free.qsize())]
    numel = sum(flat.layout.padded_numel for flat in flats)
    host = held([*tensors, *sums, *staging], weights)
    assert host <= 1.05 * (STATES if sums else STATES - 4) * numel
    assert (len(sums) > 0) == (stage >= 2)
    assert not any(buffer.is_pinned() for buffer in staging), "pinning is for the copies of a GPU"
    assert engine.ledger()["away"]["staging"] == sum(buffer.numel() for buffer in staging)
    predicted, away = engine.ledger()["predicted"], engine.ledger()["away"]
    assert predicted["master"] == predicted["optimizer"] == 0
    assert away["host"] + away["staging"] == pytest.approx(host, abs=64)  # step counters are counted with the states
    engine.destroy()
