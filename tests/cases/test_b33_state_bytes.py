"""B33: bytes of training state follow the formulas exactly, for every stage, dtype, optimizer and frozen share."""

import itertools

import pytest
import torch
from torch import nn

from shardledger.config import load_config
from shardledger.layout.build import build_layout
from shardledger.ledger import OptimizerBytes, state_bytes
from shardledger.plan.build import build_plan
from shardledger.runtime.describe import describe
from support.models import numbers
from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16", "fp16")
WIDTH, LAYERS, FROZEN = 100, 100, 99
NUMEL = WIDTH * (WIDTH + 1)  # of a layer: 1.01e6 in all
ALIGNMENT = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    """Equal blocks, the first `frozen` of them frozen; x[n, 100], y[n, 100]."""

    def __init__(self, layers, frozen):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        for layer in self.layers[:frozen]:
            layer.requires_grad_(False)

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x.float(), y.float())


def settings(stage, precision, optimizer="AdamW", accumulation=1):
    return {
        **config(stage, optimizer=optimizer, lr=1e-3, accumulation=accumulation),
        "bf16": {"enabled": precision == "bf16"},
        "fp16": {"enabled": precision == "fp16"},
    }


def formula(stage, world, precision, moments, accumulation):
    """Bytes a trainable and a frozen parameter, without padding: the article's account with fp32 sums of gradients."""
    half = precision != "fp32"
    optim, grad, param = (world if stage >= at else 1 for at in (1, 2, 3))
    weight = 2 if half else 4
    states = (moments + 4 * half) / optim
    if not half or stage == 0:
        gradients = 4 / grad
    elif stage == 1:
        gradients = 4 if accumulation > 1 else 2 + 4 / world
    else:
        gradients = 4 / world
    # Stage 3 casts the fp32 masters while it gathers, and keeps no 16-bit shard.
    weights = 0 if half and stage == 3 else weight / param
    return weights + gradients + states, weight / param


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("frozen", [0, FROZEN])
def test_planned_bytes_follow_the_formulas(frozen, world):
    with torch.device("meta"):
        spec = describe(Model(LAYERS, frozen))
    for stage, precision, (optimizer, moments), accumulation in itertools.product(
        STAGES, PRECISIONS, (("SGD", 0), ("AdamW", 8)), (1, 2)
    ):
        loaded = load_config(settings(stage, precision, optimizer, accumulation), world=world)
        plan = build_plan(loaded, spec, world=world)
        layout = build_layout(plan, spec)
        trained, still = formula(stage, world, precision, moments, accumulation)
        right = trained * NUMEL * (LAYERS - frozen) + still * NUMEL * frozen
        where = f"stage {stage}, {precision}, {optimizer}, accumulation {accumulation}"
        totals = [
            sum(state_bytes(plan, layout, OptimizerBytes(moments, 4 if moments else 0), rank).values())
            for rank in range(world)
        ]
        # Padding: less than world x alignment elements a unit. Step counters: 4 bytes a piece, two or three pieces.
        padding = ALIGNMENT * world * (16 + 2) * LAYERS + 4 * 3 * LAYERS * (1 if stage else world)
        for total in totals:
            assert abs(total - right) <= padding, where
        # What the ranks hold together is what one holds alone, where everything is sharded.
        if stage == 3:
            assert sum(totals) == pytest.approx(right * world, rel=0.01), where


def train_a_step(frozen, precision):
    import shardledger as sl

    found = {}
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with group():
        for stage in STAGES:
            engine = sl.initialize(model=Model(LAYERS, frozen), config=settings(stage, precision))[0]
            x, y = (part.to(dtype) for part in numbers(1, WIDTH, WIDTH))
            engine.backward(engine(x, y))
            engine.step()
            found[stage] = engine.ledger()
            engine.destroy()
    return found


@pytest.mark.parametrize("frozen", [0, FROZEN])
@pytest.mark.parametrize(("world", "precision"), [(1, "bf16"), (2, "fp32"), (4, "fp16")])
def test_bytes_in_the_engine_are_the_planned_ones(world, precision, frozen):
    for found in run_ranks(train_a_step, world, frozen, precision, timeout=120):
        for stage, account in found.items():
            for category in ("params", "grads", "master", "optimizer"):
                assert account["measured"][category] == account["predicted"][category], f"stage {stage}, {category}"
            trained, still = formula(stage, world, precision, 8, 1)
            right = trained * NUMEL * (LAYERS - frozen) + still * NUMEL * frozen
            held = sum(account["measured"][category] for category in ("params", "grads", "master", "optimizer"))
            assert held == pytest.approx(right, rel=0.03, abs=20_000), f"stage {stage}"
