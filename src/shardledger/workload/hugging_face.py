"""A Hugging Face model from its ``config.json``, without weights: for planning, through transformers when installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from torch import Tensor, nn

from shardledger.errors import ConfigError


class CausalLoss(nn.Module):
    """Calls a causal language model as the built-in ones are called: ``module(tokens, targets)`` is the loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        return loss


def is_hugging_face(name: str) -> bool:
    """Whether a model's name is a path of a ``config.json``, or of a folder with one."""
    path = Path(name)
    return path.suffix == ".json" or (path / "config.json").is_file()


def hugging_face_factory(name: str) -> Callable[[], nn.Module]:
    """A function that builds the model with fresh weights on the default device.

    Raises:
        ConfigError: no such file, not a model's config, or transformers is not installed.
    """
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model {name}: {path} cannot be read: {error.strerror or error}.") from None
    except ValueError as error:
        raise ConfigError(f"model {name}: {path} is not JSON: {error}.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise ConfigError(f"model {name}: {path} has no model_type: it is not a Hugging Face model's config.")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ConfigError(
            f"model {name}: a Hugging Face config is built by transformers, which is not installed; pip install "
            f"'shardledger[hf]', or count states alone with --params."
        ) from None
    try:
        config = AutoConfig.for_model(**content)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"model {name}: transformers does not read {path}: {error}") from None
    config.use_cache = False

    def build() -> nn.Module:
        return CausalLoss(AutoModelForCausalLM.from_config(config))

    return build
