"""What a model does to its own tensors inside a pass: as in plain torch, or refused by name, and nothing is kept for good."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardledger as sl
from shardledger.errors import EngineStateError, ReleasedParameterError
from support.memory import StorageMeter
from support.models import build, data
from support.training import config

STAGES = (0, 1, 2, 3)


class Writer(nn.Module):
    """x[n, 4] -> x[n, 4], writing to a tensor of its own on the way."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.how = how

    def forward(self, x):
        y = torch.tanh(self.layer(x))
        if self.how == "saved activation":
            y.mul_(2.0)
        elif self.how == "weight":
            with torch.no_grad():
                self.layer.weight.clamp_(-0.1, 0.1)
        elif self.how == "weight data":
            self.layer.weight.data.clamp_(-0.1, 0.1)
        elif self.how == "embedding":
            y = y + nn.functional.embedding(torch.tensor([1]), self.layer.weight, max_norm=0.1)
        return y


def model_of(how):
    torch.manual_seed(0)
    return nn.Sequential(Writer(how), Writer(""), nn.Linear(4, 1))


def train(how, stage, precision="fp32"):
    engine = sl.initialize(model=model_of(how), config=config(stage, precision=precision))[0]
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).float().square().mean())
            engine.step()
        return engine.state_dict()
    finally:
        engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_saved_activation_that_is_written_over_is_refused_as_in_plain_torch(stage):
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1; version 0"):
        train("saved activation", stage)


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("how", ("weight", "weight data", "embedding"))
def test_a_weight_written_in_forward_is_kept_where_it_stays_and_refused_where_it_would_be_lost(how, precision):
    if how != "embedding":  # which writes after the row was used
        for stage in (0, 1, 2):
            assert train(how, stage, precision)["0.layer.weight"].abs().max() < 0.15, stage
    with pytest.raises(
        EngineStateError, match=r"'0.layer.weight' was written to while unit .*step 1, forward.*modifier_rank"
    ):
        train(how, 3, precision)


@pytest.mark.parametrize("home", ("cpu", "nvme"))
@pytest.mark.parametrize("precision", ("fp32", "bf16"))
def test_edits_of_weights_reach_masters_that_rest_elsewhere(precision, home, tmp_path):
    def edited(zero):
        engine = sl.initialize(model=model_of(""), config=config(2, precision=precision, zero=zero))[0]
        for moment in ("after the step", "after backward"):
            if moment == "after the step":
                engine.backward(engine(torch.ones(2, 4)).float().square().mean())
                engine.step()
            else:
                engine.backward(engine(torch.ones(2, 4)).float().square().mean())
            with torch.no_grad():
                engine.module[1].layer.weight.mul_(0.5)
        engine.step()
        weights = engine.state_dict()
        engine.destroy()
        return weights

    right, ours = edited({}), edited({"offload_optimizer": {"device": home, "nvme_path": str(tmp_path)}})
    assert all(torch.equal(value, right[name]) for name, value in ours.items())


def test_an_engine_that_refused_such_a_write_goes_on():
    engine = sl.initialize(model=model_of("weight"), config=config(3))[0]
    with pytest.raises(EngineStateError, match="was written to"):
        engine(torch.ones(2, 4))
    engine.module[0].how = ""
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    weights = engine.state_dict()
    engine.destroy()
    assert all(torch.equal(value, weights[name]) for name, value in plain_step().items())


def plain_step():
    model = model_of("")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_graphs_that_no_backward_pass_uses_up_are_freed_when_they_are_dropped(stage):
    engine = sl.initialize(model=build("transformer"), config=config(stage))[0]
    batch = [part[:4] for part in data("transformer", 12)]
    with StorageMeter() as meter:
        counts = []
        for turn in range(4):
            loss = engine(*batch)
            if turn >= 2:
                loss.backward(retain_graph=True)
                engine.zero_grad()
            del loss
            counts.append(meter.bytes())
    engine.destroy()
    assert counts[0] == counts[1] and counts[2] == counts[3], counts


@pytest.mark.parametrize("stage", (0, 3))
def test_an_engine_is_converted_by_its_configuration_only(stage):
    engine = sl.initialize(model=build("regressor"), config=config(stage, precision="bf16"))[0]
    for same in (lambda: engine.to("cpu"), lambda: engine.bfloat16(), lambda: engine.to(torch.bfloat16), engine.cpu):
        assert same() is engine
    for other in (engine.half, engine.float, lambda: engine.to(torch.float64), engine.cuda, engine.share_memory):
        with pytest.raises(EngineStateError, match="compute in bfloat16 on cpu.*initialize.device"):
            other()
    for copies in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(EngineStateError, match="cannot be copied"):
            copies(engine)
    if stage == 3:
        with pytest.raises(ReleasedParameterError, match="'first.weight'.*'half' cannot convert it.*configuration"):
            engine.module.half()
    engine.destroy()
    assert engine.float() is engine.module if stage == 0 else True
