"""``shardledger.plan``: from a model and a configuration to rows and a recommendation, with nothing allocated."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardledger as sl
from shardledger.forecast import Links, Question, base_config, situation_of
from shardledger.ledger import CATEGORIES
from shardledger.ledger.traffic import Speed
from shardledger.workload import GPT, GPTConfig

SHAPE = GPTConfig(layers=3, heads=2, width=64, context=32)


class Pairs(nn.Module):
    """Three blocks over (x[n, 16], {"y": y[n, 16]})."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.register_buffer("scale", torch.full((16,), 2.0))

    def forward(self, x, named):
        return F.mse_loss(self.blocks(x) * self.scale, named["y"])


def plan(**changes):
    return sl.plan(**{"model": lambda: GPT(SHAPE), "world_size": 4, "seq_len": 32, "micro_batch": 2, **changes})


@pytest.fixture(scope="module")
def found():
    return plan()


def test_there_is_one_row_for_each_stage_offload_and_recomputation(found):
    choices = [(row.stage, row.offload, row.checkpointing) for row in found.rows]
    assert len(choices) == len(set(choices)) == 2 * (3 * 3 + 5)
    for row in found.rows:
        assert row.total == sum(getattr(row, category) for category in CATEGORIES)
        assert row.micro_batch == 2 and row.peak_phase in ("init", "forward", "backward", "step")
        assert (row.host_bytes > 0) == (row.offload != "none") and (row.disk_bytes > 0) == ("nvme" in row.offload)
    totals = {(r.stage, r.offload): r.total for r in found.rows if not r.checkpointing}
    for stage in range(4):
        assert totals[stage, "optimizer:cpu"] < totals[stage, "none"]
    assert totals[3, "optimizer:cpu+param:cpu"] < totals[3, "optimizer:cpu"]


def test_the_timeline_of_a_step_reaches_the_peak(found):
    run = found.runs[3, False, 2].run
    assert max(nbytes for *_, nbytes in run.timeline) == run.highest.total
    phases = list(dict.fromkeys(phase for phase, *_ in run.timeline))
    assert phases[-3:] == ["forward", "backward", "step"]
    assert {"blocks.0", "blocks.1", "blocks.2"} <= {unit for _, unit, _ in run.timeline}


def test_a_module_of_the_users_is_planned_and_not_touched():
    model = Pairs()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = (torch.zeros(2, 16), {"y": torch.zeros(2, 16)})
    found = sl.plan(model, {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, world_size=8, batch=batch)
    assert found.spec.numel == 3 * 17 * 16 and found.rows[0].optimizer == 0
    assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model._forward_hooks and not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_model_born_on_the_meta_device_is_planned(found):
    with torch.device("meta"):
        model = GPT(SHAPE)
    assert plan(model=model).rows == found.rows


def test_more_batch_takes_more_activations_and_recomputation_takes_fewer():
    rows = {
        (r.checkpointing, r.micro_batch): r
        for r in plan(micro_batch=[1, 8]).rows
        if (r.stage, r.offload) == (2, "none")
    }
    assert rows[False, 8].total > rows[False, 1].total
    assert rows[True, 8].total < rows[False, 8].total
    assert rows[True, 8].sent_bytes_per_step == rows[False, 8].sent_bytes_per_step


def test_adapters_leave_states_for_the_trained_part_only(found):
    whole, adapters = found.rows[0], plan(trainable="lora:r=4").rows[0]
    assert adapters.optimizer < whole.optimizer / 4 and adapters.master < whole.master / 4
    assert adapters.params > whole.params  # the base stays, the adapters come on top


def test_a_choice_is_recommended_when_the_memory_is_known(found):
    assert found.recommended is None
    totals = {r.stage: r.total for r in found.rows if r.offload == "none" and not r.checkpointing}
    tight = plan(device_memory=totals[1])
    assert tight.recommended.row.stage == 1 and "Stage 1 fits" in tight.recommended.reason
    assert plan(device_memory="1GiB").recommended.row.stage == 0


def test_a_budget_and_the_speed_of_links_are_questions_from_python_too(found):
    leanest = min(row.total for row in found.rows if row.offload == "none")
    under = plan(memory_budget=leanest)
    row = under.recommended.row
    assert row.total <= leanest and row in under.rows
    assert "memory budget" in under.recommended.reason
    totals = {r.stage: r.total for r in found.rows if r.offload == "none" and not r.checkpointing}
    question = Question(
        model="gpt:1m", world=4, device_memory=totals[3], links=Links(bandwidth=1e9, flops=1e15, task_samples=5)
    )
    situation = situation_of(question, base_config(question), found.spec)
    assert (situation.speed, situation.tokens) == (Speed(bandwidth=1e9, flops=1e15), 1024)
    assert situation.task_samples == 5


def test_branches_on_values_go_the_way_of_a_whole_batch():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x, mask):
            if not torch.all(mask == 1) or torch.any(x.isnan()):
                raise AssertionError("the way of padded or broken batches")
            return self.linear(x).float().mean()

    batch = (torch.ones(2, 16), torch.ones(2, 16))
    assert sl.plan(Masked(), world_size=2, batch=batch).rows


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"world_size": 0}, sl.ConfigError, "at least one rank"),
        ({"model": "gpt:1g"}, sl.ConfigError, "there is no such size"),
        ({"model": 3}, sl.ConfigError, "a model's name, a torch.nn.Module or a function, got int"),
        ({"model": lambda: 3}, sl.ConfigError, "returned a int, not a torch.nn.Module"),
        ({"config": {"optimiser": {}}}, sl.ConfigError, "optimizer"),
        ({"trainable": "lora:r=0"}, sl.ConfigError, "lora:r=16"),
        ({"bandwidth": 5}, sl.ConfigError, "bandwidth: .*5GB/s"),
        ({"memory_budget": "1GiB", "device_memory": "2GiB"}, sl.ConfigError, "ask one of them"),
        ({"device_memory": "80G"}, sl.ConfigError, "device_memory: .*80GiB"),
        ({"model": Pairs}, sl.PlanError, "cannot be run without values.*tokens and targets"),
    ],
)
def test_mistakes_are_told(changes, error, words):
    with pytest.raises(error, match=f"(?s){words}"):
        plan(**changes)


def test_a_model_that_reads_values_is_refused_with_the_cause():
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(torch.from_numpy(x.numpy())).mean()

    with pytest.raises(sl.PlanError, match="code that reads values"):
        sl.plan(Reads(), world_size=2, batch=(torch.ones(2, 4),))
