"""B65: a parameter larger than the buffer failed late, and so did a missing library of the disk."""

import torch
from torch import nn

import shardledger as sl


def test_a_parameter_larger_than_the_buffer_is_moved_in_parts(tmp_path):
    weights = []
    for home in ("none", "nvme"):
        section = {"device": home, "nvme_path": str(tmp_path)}
        torch.manual_seed(0)
        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": section,
                "offload_param": {**section, "buffer_size": 10, "buffer_count": 1},
            },
        }
        engine = sl.initialize(model=nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), config=settings, device="cpu")[
            0
        ]
        if home == "nvme":
            tiles = [tile for held in engine._live().offload.tiles.values() for tile in held]
            assert len(tiles) > 2 and max(tile.tile.interval.numel for tile in tiles) <= 1024 + 64
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 64)).square().mean())
            engine.step()
        weights.append(engine.state_dict())
        engine.destroy()
    assert all(torch.equal(weights[1][name], value) for name, value in weights[0].items())
