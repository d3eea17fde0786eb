"""torch.compile and the engine: what is compiled, what stays as it was, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import shardledger as sl
from support.models import numbers
from support.training import config


class Block(nn.Module):
    """Counts its calls in a buffer, knows its number in the model, drops out, and may break the graph."""

    def __init__(self, number: int, breaks: bool) -> None:
        super().__init__()
        self.number, self.breaks = number, breaks
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        inner = self.linear(self.norm(x)) * (1 + 0.1 * self.number)
        if self.breaks:
            torch._dynamo.graph_break()
        return x + self.drop(torch.tanh(inner))


class Net(nn.Module):
    def __init__(self, layers: int = 3, breaks: bool = False, numbered: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number if numbered else 1, breaks) for number in range(layers))
        self.blocks[1].norm.requires_grad_(False)
        self.head = nn.Linear(8, 8)

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def trained(stage, backend=None, *, breaks=False, layers=3, numbered=False, **own):
    """Losses and weights of three steps of two micro-batches, evaluated between; graphs after each step."""
    torch.manual_seed(0)
    compiled = {"compile": {"backend": backend, "fullgraph": not breaks}} if backend else {}
    settings = config(stage, optimizer="AdamW", lr=0.01, accumulation=2, shardledger={**own, **compiled})
    engine = sl.initialize(model=Net(layers, breaks, numbered), config=settings, device="cpu")[0]
    assert engine.is_compiled == bool(backend)
    losses, graphs = [], []
    for step in range(3):
        for micro in range(2):
            loss = engine(*numbers(3, 8, 8, seed=2 * step + micro))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(engine.eval()(*numbers(3, 8, 8, seed=9)).item())
        engine.train()
        graphs.append(counters["stats"]["unique_graphs"])
    weights = engine.state_dict()
    engine.destroy()
    return losses, weights, graphs


@pytest.mark.parametrize(("stage", "breaks", "recompute"), [(1, False, True), (3, True, False), (3, False, True)])
def test_compiled_units_give_the_same_bits_and_are_compiled_once(stage, breaks, recompute):
    right, weights, _ = trained(stage, breaks=breaks, activation_checkpointing=recompute)
    losses, compiled, graphs = trained(stage, "aot_eager", breaks=breaks, activation_checkpointing=recompute)
    assert losses == right
    assert all(torch.equal(compiled[name], weights[name]) for name in weights)
    assert graphs[0] >= 4, "blocks that train and one that does so in part, in training and in evaluation"
    assert graphs == [graphs[0]] * 3, "a later step was traced again"


def test_more_blocks_that_know_their_number_than_torch_compiles_of_one_class_are_all_compiled():
    assert trained(3, "eager", layers=9, numbered=True)[2] == [18] * 3


def test_a_model_is_what_it_was_after_destroy_and_after_an_initialize_that_failed():
    model = Net()
    model.blocks[0] = wrapper = torch.compile(model.blocks[0], backend="eager")
    model.blocks[2].compile(backend="eager")
    own_call, names = model.blocks[2]._compiled_call_impl, list(model.state_dict())
    own_forward = model.head.forward = torch.compile(model.head.forward, backend="eager")
    assert names[0].startswith("blocks.0._orig_mod.")

    def is_as_it_was():
        return (
            model.blocks[0] is wrapper
            and model.blocks[2]._compiled_call_impl is own_call
            and list(model.state_dict()) == names
            and "forward" not in vars(wrapper._orig_mod) | vars(model.blocks[2])
            and model.head.forward is own_forward
        )

    with pytest.raises(sl.ConfigError, match="no optimizer"):
        sl.initialize(model=model, config={"train_batch_size": 1}, device="cpu")
    assert is_as_it_was()
    own = {"activation_checkpointing": True}
    engine = sl.initialize(model=model, config=config(2, shardledger=own), device="cpu")[0]
    assert not any("_orig_mod" in name for name, _ in engine.module.named_parameters())
    engine.backward(engine(*numbers(3, 8, 8)))
    engine.step()
    assert counters["stats"]["unique_graphs"] == 3
    engine.destroy()
    assert is_as_it_was()


def test_a_checkpoint_of_a_compiled_model_is_one_of_the_plain_model(tmp_path):
    engine = sl.initialize(model=torch.compile(Net(), backend="eager"), config=config(3), device="cpu")[0]
    engine.backward(engine(*numbers(3, 8, 8)))
    engine.step()
    weights = engine.state_dict()
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    plain = sl.initialize(model=Net(), config=config(1), device="cpu")[0]
    plain.load_checkpoint(tmp_path)
    assert all(torch.equal(value, weights[name]) for name, value in plain.state_dict().items())
    plain.destroy()


def test_what_cannot_be_compiled_is_refused_with_the_way_that_can():
    engine = sl.initialize(model=Net(), config=config(3), device="cpu")[0]
    for arguments, says in (
        ({"schedule": [1]}, r"schedule.*DeepCompile.*Leave it out"),
        ({"compiled_autograd_enabled": True}, r"compiled_autograd_enabled.*hooks"),
        ({"backend": "fastest"}, r"torch\.compile refused.*fastest"),
        ({"compile_kwargs": {"moed": "default"}}, r"torch\.compile refused.*moed"),
    ):
        with pytest.raises(sl.ConfigError, match=says):
            engine.compile(**arguments)
    assert not engine.is_compiled
    block, engine.module.blocks[0] = engine.module.blocks[0], torch.compile(engine.module.blocks[0])
    with pytest.raises(sl.EngineStateError, match=r"'blocks\.0\._orig_mod\.norm\.weight'.*engine\.compile\(\)"):
        engine(*numbers(3, 8, 8))
    engine.module.blocks[0] = block
    with pytest.raises(sl.EngineStateError, match=r"call engine\.compile\(\)"):
        torch.compile(engine)
    engine.destroy()
    with pytest.raises(sl.ConfigError, match="fastest"):
        sl.initialize(model=Net(), config=config(0, shardledger={"compile": {"backend": "fastest"}}), device="cpu")
    wrapped = Net()
    wrapped.blocks[1] = torch.compile(wrapped.blocks[1])
    wrapped.blocks[1].register_forward_hook(lambda *_: None)
    with pytest.raises(sl.PlanError, match=r"blocks\.1 was wrapped.*hooks on the wrapper.*blocks\.1\._orig_mod"):
        sl.initialize(model=wrapped, config=config(0), device="cpu")
    with pytest.raises(sl.PlanError, match=r"is compiled.*plan the module uncompiled"):
        sl.plan(wrapped, config(0), world_size=2, batch=numbers(3, 8, 8))
