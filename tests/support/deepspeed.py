"""Checkpoints that DeepSpeed wrote, with the values that must come out (`fixtures/deepspeed/README.md`)."""

from __future__ import annotations

import importlib.util
import json
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "deepspeed"
NAMES = tuple(sorted(item.name for item in FIXTURES.iterdir() if item.is_dir()))


OLD_FIXTURES = FIXTURES.with_name("deepspeed_0.16")
OLD_NAMES = tuple(sorted(item.name for item in OLD_FIXTURES.iterdir() if item.is_dir()))


def checkpoint_of(name: str) -> Path:
    """The folder that `save_checkpoint` was called with."""
    return FIXTURES / name / "checkpoint"


@lru_cache(maxsize=2)
def expected_tensors(name: str) -> dict[str, torch.Tensor]:
    """Whole tensors by `when/what/name`."""
    return load_file(FIXTURES / name / "expected.safetensors")


@lru_cache(maxsize=2)
def expected_facts(name: str) -> dict[str, Any]:
    """What DeepSpeed had besides tensors: configuration, losses, norms, counters."""
    return json.loads((FIXTURES / name / "expected.json").read_text())


@lru_cache(maxsize=1)
def model_code() -> ModuleType:
    """The model, its param groups and its batches, in plain PyTorch."""
    spec = importlib.util.spec_from_file_location("deepspeed_fixture_model", FIXTURES / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
