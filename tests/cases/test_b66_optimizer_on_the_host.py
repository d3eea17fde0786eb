"""B66: the optimizer of the host decayed weights otherwise than the one on the device."""

import pytest
import torch
from torch import nn

import shardledger as sl


class Sized(nn.Module):
    """Parameters of odd sizes, with the gradient that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 7, 1025))

    def forward(self, step: int) -> torch.Tensor:
        factor = 0.1 * (step + 1)
        return sum(((w - 0.5).square() * factor).sum() for w in self.weights)  # type: ignore[return-value]


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_ten_steps_are_those_of_the_torch_optimizer_that_the_file_names(name, home, tmp_path):
    torch.manual_seed(0)
    plain = Sized()
    torch.manual_seed(0)
    section = {"device": home, **({"nvme_path": str(tmp_path)} if home == "nvme" else {})}
    engine = sl.initialize(
        model=Sized(),
        device="cpu",
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {
                "type": name,
                "params": {"lr": 0.01, "weight_decay": 0.1, "adam_w_mode": False}
                if name == "Adam"
                else {"lr": 0.01, "weight_decay": 0.1},
            },
            "zero_optimization": {"stage": 2, "offload_optimizer": section},
        },
    )[0]
    optimizer = getattr(torch.optim, name)(plain.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(10):
        loss = plain(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        engine.backward(engine(step))
        engine.step()
    found = engine.state_dict()
    for key, value in plain.state_dict().items():
        assert (found[key] - value).abs().max() <= 1e-6, key
    engine.destroy()
