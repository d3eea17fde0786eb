"""B08: "clipping does not work", because the printed norm is the one before it, or because the call has no effect."""

import warnings

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)


class Norm5(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return (self.w * torch.tensor([3.0, 4.0])).sum() * x


def norm_and_coefficient():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=Norm5(), config=config(stage, lr=1.0, gradient_clipping=1.0))[0]
            assert engine.get_global_grad_norm() is None, "no step has been taken"
            engine.backward(engine(torch.tensor(1.0)))
            engine.step()
            found[stage] = (
                engine.get_global_grad_norm(),
                engine.get_clip_coefficient(),
                engine.state_dict(all_ranks=True),
            )
            engine.destroy()
    return found


def test_the_norm_is_the_one_before_clipping_and_the_coefficient_is_told_apart():
    for found in run_ranks(norm_and_coefficient, 2):
        for norm, coefficient, weights in found.values():
            assert norm == pytest.approx(5.0, rel=1e-6)
            assert coefficient == pytest.approx(0.2, rel=1e-5)
            assert weights["w"].tolist() == pytest.approx([-0.6, -0.8], rel=1e-5)


def clip_by_hand():
    """torch's own clip call on the module's parameters, with no gradient_clipping in the JSON."""
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=Norm5(), config=config(stage, lr=1.0))[0]
            engine.backward(engine(torch.tensor(1.0)))
            complaint = ""
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
                    engine.step()
                except Exception as error:
                    complaint = str(error)
            complaint += " ".join(str(w.message) for w in caught)
            applied = engine.state_dict(all_ranks=True)["w"].tolist()
            found[stage] = (applied, complaint)
            engine.destroy()
    return found


def test_a_clip_call_takes_effect_or_says_that_it_does_not():
    for found in run_ranks(clip_by_hand, 2):
        for stage, (applied, complaint) in found.items():
            clipped = applied == pytest.approx([-0.6, -0.8], rel=1e-5)
            assert clipped or "gradient_clipping" in complaint, f"stage {stage} applied {applied} without a word"
