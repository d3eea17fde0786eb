"""B07: clipping by the norm of one shard, by the mean of the shards' norms, or with the coefficient applied wrongly."""

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)


class TwoParameters(nn.Module):
    """Gradients 3 and 4, each alone in a parameter of `numel` elements, at the two ends of the unit."""

    def __init__(self, numel):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(numel))
        self.b = nn.Parameter(torch.zeros(numel))

    def forward(self, x):
        return (3 * self.a[0] + 4 * self.b[-1]) * x


def clip(numel, limit, scales, **ours):
    """One SGD step with lr 1; rank r's loss is scaled by scales[r]. -> stage: (norm, a[0], b[-1])"""
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            settings = config(stage, lr=1.0, gradient_clipping=limit, shardledger=ours)
            engine = sl.initialize(model=TwoParameters(numel), config=settings)[0]
            loss = engine(torch.tensor(scales[engine.rank]))
            engine.backward(loss)
            engine.step()
            weights = engine.state_dict(all_ranks=True)
            found[stage] = (engine.get_global_grad_norm(), float(weights["a"][0]), float(weights["b"][-1]))
            engine.destroy()
    return found


@pytest.mark.parametrize(("world", "numel"), [(1, 1), (2, 1), (2, 64), (2, 4096), (4, 1), (4, 128)])
@pytest.mark.parametrize(("limit", "coefficient"), [(1.0, 0.2), (0.0, 1.0), (10.0, 1.0)])
def test_every_rank_sees_the_whole_norm_and_the_same_coefficient(world, numel, limit, coefficient):
    for found in run_ranks(clip, world, numel, limit, [1.0] * world):
        for stage, (norm, a, b) in found.items():
            assert norm == pytest.approx(5.0, rel=1e-6), f"stage {stage}: 3, 4 and 3.5 are the known wrong answers"
            assert (a, b) == pytest.approx((-3 * coefficient, -4 * coefficient), rel=1e-5), f"stage {stage}"


def test_the_norm_is_that_of_the_mean_gradient_not_of_one_ranks():
    for found in run_ranks(clip, 4, 64, 1.0, [4.0, 0.0, 0.0, 0.0]):
        for stage, (norm, a, b) in found.items():
            assert norm == pytest.approx(5.0, rel=1e-6), f"stage {stage}"
            assert (a, b) == pytest.approx((-0.6, -0.8), rel=1e-5), f"stage {stage}"


def clip_by_largest(numel, limit, scales, reproducible):
    return clip(numel, limit, scales, gradient_clipping_norm="inf", reproducible=reproducible)


@pytest.mark.parametrize(
    ("world", "numel", "reproducible"), [(1, 1, True), (2, 64, False), (4, 1, False), (2, 1, True)]
)
@pytest.mark.parametrize(("limit", "coefficient"), [(1.0, 0.25), (0.0, 1.0)])
def test_the_largest_absolute_value_is_a_norm_to_clip_by_as_well(world, numel, reproducible, limit, coefficient):
    for found in run_ranks(clip_by_largest, world, numel, limit, [-float(world)] + [0.0] * (world - 1), reproducible):
        for stage, (norm, a, b) in found.items():
            assert norm == pytest.approx(4.0, rel=1e-6), f"stage {stage}: 5 is the other norm"
            assert (a, b) == pytest.approx((3 * coefficient, 4 * coefficient), rel=1e-5), f"stage {stage}"
