"""B01: the loss differs between stages as soon as gradients are accumulated."""

import pytest

from support.models import build, data
from support.oracle import largest_difference, make_optimizer, reference
from support.ranks import run_ranks
from support.training import Job, config, mean_losses, train_all

OPTIONS = {"SGD": {"lr": 0.1}, "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}}


@pytest.mark.parametrize("world", [2, 4])
def test_every_stage_and_split_equals_one_process(world):
    keys = [(name, stage, split) for name in OPTIONS for stage in range(4) for split in (1, 2, 4)]
    jobs = [
        Job("regressor", config(s, optimizer=n, optimizer_params=OPTIONS[n], accumulation=a), samples=16)
        for n, s, a in keys
    ]
    ranks = run_ranks(train_all, world, jobs, timeout=120)
    batch = data("regressor", 16)
    references = {n: reference(build("regressor"), batch, make_optimizer(n, **OPTIONS[n])) for n in OPTIONS}
    for index, (name, stage, split) in enumerate(keys):
        right = references[name]
        outcomes = [outcomes[index] for outcomes in ranks]
        where = f"{name}, stage {stage}, {world} ranks x {split} micro-batches"
        assert outcomes[0].norms[0] == pytest.approx(0.42948, abs=5e-6), where
        assert outcomes[0].norms == pytest.approx(right.norms, rel=1e-5), where
        assert largest_difference(outcomes[0].weights, right.weights) <= 1e-6, where
        assert mean_losses(outcomes) == pytest.approx(right.losses, rel=1e-5), where
