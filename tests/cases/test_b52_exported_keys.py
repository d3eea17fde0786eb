"""B52, B53: what leaves the engine has the module's keys: ties, buffers and frozen weights too, and fp32 throughout."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardledger as sl
from shardledger.checkpoint.tools.export import export
from shardledger.checkpoint.tools.find import open_checkpoint
from support.training import config


class Everything(nn.Module):
    """A tied embedding, a persistent and another buffer, a frozen weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.layers[0].weight.requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(0, 1, 6))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, tokens):
        x = self.table(tokens) * self.scale.to(self.table.weight.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).float().square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_keys_are_those_of_the_modules_state_dict_and_floats_are_fp32(tmp_path, monkeypatch, stage):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
    model = Everything()
    frozen = model.layers[0].weight.detach().bfloat16().float()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if "bias" not in n]},
    ]
    settings = config(stage, optimizer="AdamW", precision="bf16")
    engine = sl.initialize(model=model, config=settings, model_parameters=groups, device="cpu")[0]
    engine.backward(engine(torch.arange(7).view(1, 7)))
    engine.step()
    engine.save_checkpoint(tmp_path / "checkpoints")
    consolidated = engine.state_dict()
    engine.destroy()
    export(
        open_checkpoint(tmp_path / "checkpoints"),
        tmp_path / "out",
        dtype=torch.float32,
        shard_bytes=10**9,
        config=None,
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    plain = Everything()
    for state in (exported, consolidated):
        assert set(state) == set(plain.state_dict())
        assert {value.dtype for value in state.values()} == {torch.float32}
        assert torch.equal(state["head.weight"], state["table.weight"])
        assert torch.equal(state["layers.0.weight"], frozen)
        plain.load_state_dict(state, strict=True)
        assert plain.head.weight is plain.table.weight
    assert all(torch.equal(exported[name], value) for name, value in consolidated.items())
