"""B29: touching a parameter whose values live on other ranks is an error that names it, never a no-op."""

import pytest
import torch
from torch import nn

from support.models import Layer
from support.ranks import run_ranks
from support.training import config, group

WAYS = {
    "normal_": lambda p: nn.init.normal_(p, std=0.02),
    "zero_": lambda p: p.zero_(),
    "fill_": lambda p: p.data.fill_(1.0),
    "row": lambda p: p[0].zero_(),
    "setitem": lambda p: p.__setitem__(0, 0.0),
    "copy_": lambda p: p.data.copy_(torch.zeros(64, 64)),
    "ema": lambda p: p.mul_(0.9).add_(0.1),
    "std": lambda p: float(p.std()),
    "item": lambda p: float(p[0, 0]),
    "sum": lambda p: float(p.detach().sum()),
    "data": lambda p: float(p.data.sum()),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "compare": lambda p: bool((p == 0).any()),
    "matmul": lambda p: torch.ones(1, 64) @ p,
    "norm": lambda p: torch.linalg.vector_norm(p),
    "cat": lambda p: torch.cat([p, p]),
    "set data": lambda p: setattr(p, "data", torch.zeros(64, 64)),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(64) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def touch_everything():
    import shardledger as sl

    found = {}
    with group(30):
        torch.manual_seed(0)
        engine = sl.initialize(model=Net(), config=config(3))[0]
        before = engine.state_dict()
        parameter = engine.module.layers[1].linear.weight
        assert tuple(parameter.shape) == (64, 64) and parameter.numel() == 4096 and parameter.dtype == torch.float32
        assert "layers.1.linear.weight" in dict(engine.module.named_parameters())
        for name, way in WAYS.items():
            try:
                with torch.no_grad():
                    found[name] = ("value", str(way(parameter))[:200])
            except Exception as error:
                found[name] = (type(error).__name__, str(error))
        repr(engine.module), repr(parameter)
        engine.backward(engine(torch.ones(1, 64)))
        engine.step()
        after = engine.state_dict()
        engine.destroy()
    finite = all(bool(v.isfinite().all()) for v in after.values())
    small = all(float((after[k] - before[k]).abs().max()) < 0.2 for k in after)
    return found, finite and small


def test_touching_a_released_parameter_is_an_error_that_names_it():
    for found, sound in run_ranks(touch_everything, 2):
        wrong = {
            name: outcome
            for name, outcome in found.items()
            if outcome[0] != "ReleasedParameterError" or "layers.1.linear.weight" not in outcome[1]
        }
        assert wrong == {}
        assert sound, "the attempts left traces in the weights"


def initialise_first():
    """The way that works: initialise the module before the engine takes it."""
    import shardledger as sl

    found = {}
    with group(30):
        for stage in (0, 1, 2, 3):
            torch.manual_seed(0)
            model = Net()
            model.apply(lambda m: nn.init.normal_(m.weight, std=0.02) if isinstance(m, nn.Linear) else None)
            engine = sl.initialize(model=model, config=config(stage))[0]
            found[stage] = engine.state_dict(all_ranks=True)["layers.1.linear.weight"]
            engine.destroy()
    return found


def test_an_initialisation_before_the_engine_is_kept():
    ranks = run_ranks(initialise_first, 2)
    for stage in (0, 1, 2, 3):
        assert float(ranks[0][stage].std()) == pytest.approx(0.02, rel=0.05)
        assert torch.equal(ranks[0][stage], ranks[1][stage])
