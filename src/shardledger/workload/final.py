"""The trained weights on disk: ``final/model.safetensors`` and ``final/config.json``.

The weights file holds the keys of the module's ``state_dict()``, each with its own copy, so that plain PyTorch reads
it::

    model = GPT(GPTConfig(**json.load(open("final/config.json"))["gpt"]))
    model.load_state_dict(safetensors.torch.load_file("final/model.safetensors"))
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from shardledger.errors import DataError, writing
from shardledger.workload.gpt import GPT, GPTConfig
from shardledger.workload.models import load_model

WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"


def describe_model(model: nn.Module, name: str, seq_len: int) -> dict[str, Any]:
    """What ``config.json`` must say so that the model can be built again."""
    description: dict[str, Any] = {"model": name, "seq_len": seq_len}
    if isinstance(model, GPT):
        description["gpt"] = model.config.to_dict()
    return description


def save_final(folder: str | os.PathLike[str], state: Mapping[str, Tensor], description: Mapping[str, Any]) -> None:
    """Write ``state`` (full tensors on CPU) and ``description`` into ``folder``, which is created.

    Raises:
        OutputError: there is no room, say.
    """
    path = Path(folder)
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
    # safetensors refuses tensors that share memory, which tied weights do. A copy under each name costs the tied
    # tensor once more on disk and keeps load_state_dict(strict=True) working.
    seen: set[int] = set()
    separate: dict[str, Tensor] = {}
    for key, value in state.items():
        address = value.untyped_storage().data_ptr()
        separate[key] = value.detach().clone() if address in seen else value.detach().contiguous()
        seen.add(address)
    with writing(path / WEIGHTS_NAME, SafetensorError):
        save_file(separate, path / WEIGHTS_NAME)
    with writing(path / CONFIG_NAME):
        (path / CONFIG_NAME).write_text(json.dumps(dict(description), indent=2) + "\n", encoding="utf-8")


def load_final(folder: str | os.PathLike[str]) -> nn.Module:
    """The trained model, on CPU, from a run's ``final/`` folder (or the run folder itself).

    Raises:
        DataError: the folder lacks one of its two files.
        ConfigError: the model's code cannot be found any more.
    """
    path = Path(folder)
    if not (path / CONFIG_NAME).is_file() and (path / "final" / CONFIG_NAME).is_file():
        path = path / "final"
    missing = [name for name in (CONFIG_NAME, WEIGHTS_NAME) if not (path / name).is_file()]
    if missing:
        raise DataError(f"{path} has no {' and no '.join(missing)}; a run writes both into its final/ folder.")
    description = json.loads((path / CONFIG_NAME).read_text(encoding="utf-8"))
    if "gpt" in description:
        model: nn.Module = GPT(GPTConfig(**description["gpt"]))
    else:
        model = load_model(description["model"], description["seq_len"])
    model.load_state_dict(load_file(path / WEIGHTS_NAME))
    return model
