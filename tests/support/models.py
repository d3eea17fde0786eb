"""Small models. Each takes its inputs and targets and returns the loss, so that `loss = engine(*batch)`
is the whole loop.

Sizes are chosen to be awkward: element counts that no world size divides, parameters without elements, parameters
without a gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Regressor(nn.Module):
    """Linear(3,5)-Tanh-Linear(5,1), 26 parameters; batch (x[n, 3], y[n, 1]), mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.second(torch.tanh(self.first(x))).float(), y.float())


class Block(nn.Module):
    """Pre-norm attention and MLP; a composite block, so that a unit holds several modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Decoder; batch (tokens[n, length], targets[n, length]), cross entropy. `tied`: the output uses the embedding."""

    def __init__(
        self, vocabulary: int = 13, width: int = 10, layers: int = 3, length: int = 6, tied: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.reset_parameters()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        """What a model born on the meta device needs beside the layers it is made of."""
        nn.init.normal_(self.position, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Lora(nn.Module):
    """A frozen Linear with a trainable low-rank path beside it."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, width) * 0.1)
        self.up = nn.Parameter(torch.randn(width, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class FrozenRegressor(nn.Module):
    """Lora layers and a head; batch (x[n, width], y[n, 1])."""

    def __init__(self, width: int = 9, layers: int = 3, rank: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Lora(width, rank) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(x).float(), y.float())


class Awkward(nn.Module):
    """Odd sizes, one parameter without elements, one never used, one scalar; batch (x[n, 7], y[n, 1])."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 11)
        self.empty = nn.Linear(11, 0, bias=False)
        self.unused = nn.Linear(3, 5)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.gain = nn.Parameter(torch.ones(1))
        self.second = nn.Linear(11, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        nothing = self.empty(hidden).sum()
        return F.mse_loss((self.second(hidden) * self.scale * self.gain + nothing).float(), y.float())


class TwoHeads(nn.Module):
    """One body and two heads of which each call uses one; batch (x[n, 6], y[n, 1], which)."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.body = nn.Linear(6, width)
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, which: int) -> Tensor:
        return F.mse_loss(self.heads[which](torch.tanh(self.body(x))).float(), y.float())


class Buffered(nn.Module):
    """BatchNorm, rotary-like frequencies and a step counter in buffers; batch (x[n, 8], y[n, 1])."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32, affine=False)  # CPU kernels refuse bf16 weights beside fp32 running statistics
        self.second = nn.Linear(32, 1)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 32, 2).float() / 32))
        self.register_buffer("noise", torch.randn(5))
        self.register_buffer("count", torch.tensor(256.0))
        self.register_buffer("hidden", torch.ones(3), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.count += 1
        angle = torch.outer(torch.arange(x.shape[0]).float(), self.inv_freq).cos().mean(dim=1, keepdim=True)
        return F.mse_loss(self.second(self.norm(self.first(x))).float(), y.float() * angle)


class Layer(nn.Module):
    """One Linear with a tanh: a block with a child."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Stack(nn.Module):
    """`layers` equal blocks and nothing else: layers * width * (width + 1) parameters.

    Batch (x[n, width], y[n, width]).
    """

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), y.float())


class Chain(nn.Module):
    """A Sequential; batch (x[n, 4], y[n, 2])."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 2)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).float(), y.float())


def numbers(samples: int, inputs: int, outputs: int = 1, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Fixed regression data x[samples, inputs], y[samples, outputs]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, inputs, generator=generator), torch.randn(samples, outputs, generator=generator)


def tokens(samples: int, length: int = 6, vocabulary: int = 13, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Fixed token data: inputs and next-token targets, both [samples, length]."""
    text = torch.randint(vocabulary, (samples, length + 1), generator=torch.Generator().manual_seed(seed))
    return text[:, :-1], text[:, 1:]


#: name -> (build, data of `samples` samples)
MODELS = {
    "regressor": (Regressor, lambda samples: numbers(samples, 3)),
    "transformer": (Transformer, tokens),
    "untied": (lambda: Transformer(tied=False), tokens),
    "wide": (
        lambda: Transformer(vocabulary=16, width=64, layers=6),
        lambda samples: tokens(samples, vocabulary=16),
    ),
    "frozen": (FrozenRegressor, lambda samples: numbers(samples, 9)),
    "awkward": (Awkward, lambda samples: numbers(samples, 7)),
    "buffered": (Buffered, lambda samples: numbers(samples, 8)),
    "stack": (Stack, lambda samples: numbers(samples, 64, 64)),
    "chain": (Chain, lambda samples: numbers(samples, 4, 2)),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The named model with weights from `seed`."""
    torch.manual_seed(seed)
    return MODELS[name][0]()


def data(name: str, samples: int) -> tuple[Tensor, ...]:
    """The named model's fixed data."""
    return MODELS[name][1](samples)
