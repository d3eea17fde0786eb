"""B02: with offload, gradients of micro-batches overwrote each other, in the first step otherwise than in later ones."""

import itertools

from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import Job, config, train_all


def test_offload_changes_neither_norm_nor_weights_in_the_first_step_or_later(tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    homes = {"device": {}, "cpu": {"offload_optimizer": {"device": "cpu"}}, "disk": {"offload_optimizer": disk}}
    jobs = {
        (stage, home): Job("regressor", config(stage, accumulation=4, lr=0.1, zero=homes[home]), steps=3, samples=16)
        for stage, home in itertools.product((1, 2, 3), homes)
    }
    ranks = run_ranks(train_all, 2, list(jobs.values()), timeout=90)
    for outcomes in ranks:
        found = dict(zip(jobs, outcomes, strict=True))
        right = found[1, "device"]
        assert len(set(right.norms)) == 3
        for key, outcome in found.items():
            assert max(abs(a - b) for a, b in zip(outcome.norms, right.norms, strict=True)) <= 1e-6, key
            if outcome.weights:
                assert largest_difference(outcome.weights, right.weights) <= 1e-6, key
