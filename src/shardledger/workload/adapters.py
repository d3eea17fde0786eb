"""Low-rank adapters (arXiv 2106.09685): the base is frozen, each linear layer of a block gets two small trainable ones."""

from __future__ import annotations

import re

import torch.nn.functional as F
from torch import Tensor, nn

from shardledger.errors import ConfigError

_FORM = re.compile(r"^lora(?::r=(\d+))?$")
DEFAULT_RANK = 16


class AdaptedLinear(nn.Module):
    """A frozen linear layer [.., I] -> [.., O] and a trainable path of rank r beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        kind = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, rank, **kind)
        self.up = nn.Linear(rank, base.out_features, **kind)
        nn.init.zeros_(self.up.weight)  # the adapted model starts as the base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(self.down(x), self.up.weight)


def adapter_rank(trainable: str) -> int | None:
    """The rank in ``"lora:r=16"`` or ``"lora"``; None for ``"all"``.

    Raises:
        ConfigError: it is neither.
    """
    found = _FORM.match(trainable.strip().lower())
    if trainable.strip().lower() == "all":
        return None
    if found is None or found[1] is not None and int(found[1]) < 1:
        raise ConfigError(f"trainable {trainable!r} is not known; write all, lora, or lora:r=16 (r at least 1).")
    return int(found[1] or DEFAULT_RANK)


def train_adapters(model: nn.Module, trainable: str) -> nn.Module:
    """``model`` with adapters in every ``nn.Linear`` of its repeated blocks and the rest frozen, in place.

    Raises:
        ConfigError: it has no linear layer in a list of blocks, or ``trainable`` is not understood.
    """
    rank = adapter_rank(trainable)
    if rank is None:
        return model
    model.requires_grad_(False)
    # A layer that shares its weight with another (an output head with the token table) keeps it to itself.
    shared = [id(p) for m in model.modules() for p in m._parameters.values() if p is not None]
    targets = [
        (parent, name, child)
        for path, parent in model.named_modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
        and any(part.isdigit() for part in f"{path}.{name}".split("."))
        and shared.count(id(child.weight)) == 1
    ]
    if not targets:
        raise ConfigError(
            f"trainable {trainable!r}: {type(model).__name__} has no nn.Linear inside a list of blocks to adapt."
        )
    for parent, name, child in targets:
        setattr(parent, name, AdaptedLinear(child, rank))
    return model
