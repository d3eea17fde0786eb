"""Causal language models from a Hugging Face ``config.json``: the architecture, without weights.

transformers is optional (``pip install shardledger[hf]``) and imported only here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from shardledger.errors import ConfigError


class CausalModel(nn.Module):
    """A transformers model under this package's convention: ``forward(tokens, targets)`` is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # Without use_cache=False every layer's keys and values stay alive until the output is dropped.
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def is_config(name: str) -> bool:
    """Whether a model's name is the path of a ``config.json``, or of a folder with one."""
    return name.endswith(".json") or (Path(name) / "config.json").is_file()


def causal_model(name: str) -> Callable[[int], nn.Module]:
    """A function that makes the model whose configuration lies at ``name``; its argument, the sequence length, has no
    effect.

    Raises:
        ConfigError: transformers is not installed, the file cannot be read, or it describes no causal language model.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {name!r} cannot be read as a Hugging Face config.json: {error}.") from error
    kind = raw.pop("model_type", None) if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise ConfigError(f"model {name!r} is no Hugging Face config.json: it has no model_type.")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"model {name!r}: planning a Hugging Face model needs transformers, which is not installed here ({error}). "
            f"Install it with: pip install 'shardledger[hf]'."
        ) from error
    try:
        config: Any = AutoConfig.for_model(kind, **raw)
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"model {name!r}: transformers refuses this configuration: {error}") from error

    def make(seq_len: int) -> nn.Module:
        try:
            return CausalModel(AutoModelForCausalLM.from_config(config))
        except ValueError as error:
            raise ConfigError(f"model {name!r} is no causal language model: {error}") from error

    return make
