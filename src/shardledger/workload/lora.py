"""LoRA (arXiv 2106.09685): frozen linear layers with small trained matrices beside them.

For plans and examples; adapters of other libraries (peft) are trained by the engine all the same.
"""

from __future__ import annotations

import math
import re

from torch import Tensor, nn

from shardledger.errors import ConfigError

_FORM = re.compile(r"^lora:r=(\d+)$")


class LoraLinear(nn.Module):
    """``base(x) + scale · up(down(x))``; ``base`` is frozen, ``up`` starts at zero. x [..., inputs]."""

    def __init__(self, base: nn.Linear, rank: int, scale: float = 2.0) -> None:
        super().__init__()
        placed = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False, **placed)
        self.up = nn.Linear(rank, base.out_features, bias=False, **placed)
        self.scale = scale
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.up.weight.is_meta:
            nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


def parse_trainable(text: str) -> int:
    """The rank in ``lora:r=16``.

    Raises:
        ConfigError: another form, or rank 0.
    """
    found = _FORM.match(text.replace(" ", "").lower())
    if found is None or int(found.group(1)) == 0:
        raise ConfigError(f"trainable {text!r} is not known; write lora:r=16 (16 is the rank of the adapters).")
    return int(found.group(1))


def add_adapters(model: nn.Module, rank: int) -> nn.Module:
    """Freeze ``model`` and put an adapter of ``rank`` beside every linear layer in it; changes and returns it.

    Raises:
        ConfigError: it has no linear layer.
    """
    model.requires_grad_(False)
    layers = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no nn.Linear that an adapter could stand beside.")
    for parent, name, child in layers:
        setattr(parent, name, LoraLinear(child, min(rank, child.in_features, child.out_features)))
    return model
