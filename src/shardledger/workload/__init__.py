"""What do we train: the reference GPT and byte-level text that demo, tests and benchmarks share."""

from __future__ import annotations

from shardledger.workload.data import BatchSampler, BatchShape, Corpus, TextData, read_corpus
from shardledger.workload.final import describe_model, load_final, save_final
from shardledger.workload.gpt import GPT, SIZES, GPTConfig, generate, gpt_config
from shardledger.workload.models import find_model, load_model, loss_of

__all__ = [
    "GPT",
    "SIZES",
    "BatchSampler",
    "BatchShape",
    "Corpus",
    "GPTConfig",
    "TextData",
    "describe_model",
    "find_model",
    "generate",
    "gpt_config",
    "load_final",
    "load_model",
    "loss_of",
    "read_corpus",
    "save_final",
]
