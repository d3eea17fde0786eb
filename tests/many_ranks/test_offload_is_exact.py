"""Where states rest changes no bit: every home, stage, precision and optimizer against the run on the device alone."""

import os
from pathlib import Path

import pytest
import torch

from support.oracle import same_bits
from support.ranks import run_ranks
from support.training import Job, config, train_all

TILE = 1024
"""The smallest tile: parameters of ``Wide`` are cut into several."""


def homes(folder: Path, stage: int) -> dict[str, dict[str, object]]:
    """Name -> zero_optimization keys of every way to offload at a stage."""
    cpu = {"device": "cpu"}
    disk = {"device": "nvme", "nvme_path": str(folder)}
    found = {"cpu": {"offload_optimizer": cpu}, "disk": {"offload_optimizer": disk, "sub_group_size": TILE}}
    if stage == 3:
        found["cpu, cpu"] = {"offload_optimizer": cpu, "offload_param": cpu}
        found["disk, cpu"] = {"offload_optimizer": disk, "offload_param": cpu}
        found["disk, disk"] = {"offload_optimizer": disk, "offload_param": {**disk, "buffer_size": TILE}}
    return found


def train_beside(jobs: list[Job], apart: bool) -> list[object]:
    """``apart``: as on a device whose memory is not the host's, every byte crosses the link."""
    import shardledger.api

    shardledger.api._is_host_memory = lambda device: not apart
    try:
        return train_all(jobs)
    finally:
        shardledger.api._is_host_memory = lambda device: device.type == "cpu"


def wrong(groups: dict[object, dict[object, Job]], world: int, *, apart: bool) -> dict[object, object]:
    """Runs that differ in any bit from the first one of their group, by what differs."""
    keys = [(group, key) for group, jobs in groups.items() for key in jobs]
    by_rank = run_ranks(train_beside, world, [groups[group][key] for group, key in keys], apart, timeout=240)
    runs = {key: [outcomes[i] for outcomes in by_rank] for i, key in enumerate(keys)}
    found: dict[object, object] = {}
    for group, key in keys:
        outcomes, first = runs[group, key], runs[group, next(iter(groups[group]))]
        names = same_bits(outcomes[0].weights, first[0].weights)
        seen = [(o.losses, o.norms) for o in outcomes]
        if names or seen != [(o.losses, o.norms) for o in first]:
            found[group, key] = names or seen
    return found


@pytest.mark.parametrize(("precision", "apart"), [("fp32", False), ("bf16", False), ("bf16", True), ("fp32", True)])
def test_no_home_changes_a_bit(precision, apart, tmp_path):
    options = {"optimizer": "AdamW", "lr": 0.01, "precision": precision, "gradient_clipping": 0.1}
    groups: dict[object, dict[object, Job]] = {}
    for stage in range(4) if (precision, apart) != ("fp32", True) else (1, 3):
        # Two steps with accumulation: the second one reads what the first one wrote.
        groups[stage] = {"device": Job("transformer", config(stage, accumulation=2, **options), steps=2)}
        for name, zero in homes(tmp_path, stage).items():
            groups[stage][name] = Job("transformer", config(stage, accumulation=2, zero=zero, **options), steps=2)
    assert wrong(groups, 2, apart=apart) == {}
    assert list(tmp_path.iterdir()) == []


def test_optimizers_of_every_kind_find_their_states_again(tmp_path):
    recipes = {
        "SGD": {"lr": 0.1},
        "SGD, momentum": {"lr": 0.1, "momentum": 0.9},
        "Adam, amsgrad": {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1},
        "Adagrad": {"lr": 0.1},
        "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
        "NAdam": {"lr": 0.01},
        "Rprop": {"lr": 0.01},
    }
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}, "sub_group_size": TILE}
    groups: dict[object, dict[object, Job]] = {}
    for recipe, parameters in recipes.items():
        options = {"optimizer": recipe.split(",")[0], "optimizer_params": parameters}
        for model in ("awkward", "frozen") if recipe in ("Adagrad", "NAdam") else ("awkward",):
            jobs = {zero is None: Job(model, config(3, zero=zero, **options), steps=3) for zero in (None, disk)}
            groups[recipe, model] = jobs
    assert wrong(groups, 2, apart=False) == {}


@pytest.mark.parametrize("world", [1, 3])
def test_odd_sizes_more_ranks_than_elements_and_a_part_of_the_states(world, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    groups: dict[object, dict[object, Job]] = {}
    for stage, model in ((1, "regressor"), (3, "regressor"), (3, "awkward"), (2, "chain")):
        options = {"optimizer": "AdamW", "lr": 0.01}
        jobs: dict[object, Job] = {"device": Job(model, config(stage, **options), steps=3)}
        for ratio, pipelined in ((0.5, True), (1.0, False)):
            section = {
                **disk,
                "ratio": ratio,
                "buffer_count": 1,
                "pipeline_read": pipelined,
                "pipeline_write": pipelined,
            }
            jobs[ratio] = Job(model, config(stage, zero={"offload_optimizer": section}, **options), steps=3)
        groups[stage, model] = jobs
    assert wrong(groups, world, apart=False) == {}
    assert os.listdir(tmp_path) == []


def test_a_cut_inside_a_parameter_changes_no_bit_of_the_fused_step():
    torch.manual_seed(0)
    for numel in (1025, 4096, 5003):
        start, gradient = torch.randn(numel), torch.randn(numel)
        whole = start.clone().requires_grad_()
        parts = [part.clone().requires_grad_() for part in start.split(TILE)]
        runs = ([whole], [gradient]), (parts, gradient.split(TILE))
        for tensors, gradients in runs:
            optimizer = torch.optim.AdamW(tensors, lr=0.1, fused=True)
            for _ in range(3):
                for tensor, part in zip(tensors, gradients, strict=True):
                    tensor.grad = part.clone()
                optimizer.step()
        assert torch.equal(whole.detach(), torch.cat([part.detach() for part in parts]))
