"""B04: the loss is divided by the accumulation twice, or the reported loss depends on it."""

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)


class Product(nn.Module):
    """loss = w * x with w = 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.w * x


def train_product(accumulation, plain_backward):
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=Product(), config=config(stage, lr=1.0, accumulation=accumulation))[0]
            handed_back = []
            for _ in range(2):
                for _ in range(accumulation):
                    loss = engine(torch.tensor(1.0))
                    if plain_backward:
                        loss.backward()
                        handed_back.append(float(loss))
                    else:
                        handed_back.append(float(engine.backward(loss)))
                    engine.step()
            found[stage] = (float(engine.state_dict(all_ranks=True)["w"]), handed_back)
            engine.destroy()
    return found


@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4, 8])
def test_the_mean_gradient_is_applied_once_and_the_loss_stays_the_callers(accumulation, plain_backward):
    for found in run_ranks(train_product, 2, accumulation, plain_backward):
        for stage, (weight, losses) in found.items():
            assert weight == pytest.approx(-2.0, abs=1e-6), f"stage {stage}"
            # Before the first step w = 0, before the second w = -1: the undivided loss, whatever the accumulation.
            assert losses == pytest.approx([0.0] * accumulation + [-1.0] * accumulation, abs=1e-6), f"stage {stage}"
