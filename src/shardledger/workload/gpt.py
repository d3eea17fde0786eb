"""A decoder-only GPT over bytes: pre-norm blocks, learned positions, fused attention.

It is the model that the demo, the tests and the benchmarks share. The vocabulary is the 256 byte values, so no
tokenizer is needed and any file is training data.

Every module that owns parameters initialises them in ``reset_parameters()``. A model built on the meta device can thus
be brought to life one unit at a time, without the whole model ever being in the memory of one process.

Shapes: B sequences of T tokens, width W, H heads, vocabulary V.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardledger.errors import ConfigError

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The shape of a GPT.

    ``context`` is the longest sequence (rows of the position table); ``tied`` lets the output head share the weight of
    the token table; ``bias`` gives every linear layer a bias.
    """

    layers: int = 3
    heads: int = 5
    width: int = 160
    context: int = 256
    vocabulary: int = 256
    tied: bool = True
    bias: bool = True

    def __post_init__(self) -> None:
        wrong = [f"{name} = {value}" for name, value in asdict(self).items() if type(value) is int and value < 1]
        if wrong:
            raise ConfigError(f"GPTConfig needs positive sizes, got {', '.join(wrong)}.")
        if self.width % self.heads:
            raise ConfigError(
                f"GPTConfig: width {self.width} is not divisible by heads {self.heads}; every head gets width / heads."
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values; ``GPTConfig(**config.to_dict())`` gives an equal config."""
        return asdict(self)


# Widths and heads are those of GPT-2. With 256 bytes instead of 50,257 tokens the token table is nearly free, so
# "124m" and "350m" have more blocks than GPT-2 (17 for 12, 28 for 24): the name stays what the model weighs, and all
# of it computes. The sizes in billions are those of GPT-3 and Llama, likewise; they are there to be planned.
SIZES: Mapping[str, GPTConfig] = {
    "1m": GPTConfig(layers=3, heads=5, width=160),
    "25m": GPTConfig(layers=8, heads=8, width=512, context=1024),
    "124m": GPTConfig(layers=17, heads=12, width=768, context=1024),
    "350m": GPTConfig(layers=28, heads=16, width=1024, context=1024),
    "1.3b": GPTConfig(layers=26, heads=16, width=2048, context=2048),
    "7b": GPTConfig(layers=35, heads=32, width=4096, context=2048),
    "13b": GPTConfig(layers=41, heads=40, width=5120, context=2048),
    "70b": GPTConfig(layers=87, heads=64, width=8192, context=2048),
}


def gpt_config(size: str, context: int | None = None) -> GPTConfig:
    """The config of a named size, its position table cut or stretched to ``context`` tokens.

    Raises:
        ConfigError: there is no such size; the message lists them and names the nearest.
    """
    found = SIZES.get(size.lower())
    if found is None:
        near = _nearest_size(size.lower())
        hint = f" Did you mean gpt:{near}?" if near else ""
        raise ConfigError(f"model gpt:{size}: there is no such size; the sizes are {', '.join(SIZES)}.{hint}")
    return found if context is None else GPTConfig(**{**found.to_dict(), "context": context})


def _nearest_size(wanted: str) -> str | None:
    """By weight when ``wanted`` is a number of millions or billions, by spelling otherwise."""
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|b)?", wanted)
    if number is None or float(number[1]) == 0:
        return next(iter(difflib.get_close_matches(wanted, SIZES, n=1, cutoff=0.4)), None)
    scale = {"k": 1e-3, "m": 1.0, "b": 1e3, None: 1.0}
    millions = float(number[1]) * scale[number[2]]
    return min(SIZES, key=lambda size: abs(math.log(float(size[:-1]) * scale[size[-1]] / millions)))


class Linear(nn.Linear):
    """A linear layer whose weight starts as N(0, std) and whose bias starts at zero."""

    std: float = INIT_STD  # read by the first reset, which nn.Linear's constructor runs before the instance has its own

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = INIT_STD) -> None:
        super().__init__(inputs, outputs, bias=bias)
        if std != INIT_STD:
            self.std = std
            self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Embedding(nn.Embedding):
    """A table whose rows start as N(0, 0.02)."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=INIT_STD)


class Attention(nn.Module):
    """Causal self-attention, [B, T, W] -> [B, T, W]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = Linear(config.width, 3 * config.width, bias=config.bias)
        # Each block adds to the residual stream twice; this keeps the variance at the end independent of the depth.
        self.project = Linear(config.width, config.width, bias=config.bias, std=INIT_STD / (2 * config.layers) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = packed.permute(2, 0, 3, 1, 4)  # each [B, H, T, W / H]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between, [B, T, W] -> [B, T, W]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = Linear(config.width, 4 * config.width, bias=config.bias)
        self.project = Linear(
            4 * config.width, config.width, bias=config.bias, std=INIT_STD / (2 * config.layers) ** 0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.project(F.gelu(self.expand(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer block: what the engine gathers and reduces together."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """The whole model; ``forward(tokens, targets)`` is the mean cross entropy in nats per byte."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_table = Embedding(config.vocabulary, config.width)
        self.position_table = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.token_table.weight

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [B, T, V] of the next token, or the scalar loss when ``targets`` is given.

        ``tokens`` and ``targets`` are int64 [B, T] with T <= config.context.
        """
        length = tokens.shape[1]
        if length > self.config.context:
            raise ConfigError(
                f"a sequence of {length} tokens does not fit the model's context of {self.config.context}; "
                f"shorten it or build the model with GPTConfig(context={length})."
            )
        x = self.token_table(tokens) + self.position_table(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        # In fp32 even when the model computes in bf16: the sum over the vocabulary needs the digits.
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def generate(model: GPT, prompt: bytes, count: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
    """``prompt`` followed by ``count`` sampled bytes.

    ``model`` is a plain module on CPU. Temperature 0 always takes the likeliest byte. The same seed gives the same
    text.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt or b"\n")], dtype=torch.int64)  # [1, T]
    was_training = model.training
    model.eval()
    for _ in range(count):
        logits = model(tokens[:, -model.config.context :])[0, -1].float()  # [V]
        if temperature == 0:
            following = logits.argmax().view(1)
        else:
            following = torch.multinomial(F.softmax(logits / temperature, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, following.view(1, 1)], dim=1)
    model.train(was_training)
    return bytes(tokens[0].tolist()) if prompt else bytes(tokens[0, 1:].tolist())
