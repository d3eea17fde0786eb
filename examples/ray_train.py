"""shardledger inside Ray Train: Ray starts the ranks and starts them again when a machine is lost.

    python examples/ray_train.py /shared/runs/ray

Ray's workers come with a process group, and the engine uses it. Checkpoints go straight to a folder that all machines see:
every rank writes its own shard there, so nothing has to be collected for ``ray.train.report``. After a failure Ray calls
``train`` anew, on as many workers as it is told to, and ``load_checkpoint`` goes on from the last complete save.
"""

from __future__ import annotations

import sys

import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device

import shardledger as sl
from shardledger.workload import GPT, GPTConfig

STEPS = 1000
SAVE_EVERY = 100
SHAPE = GPTConfig(layers=12, heads=12, width=768, context=512)
CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "zero_optimization": {"stage": 3},
    "shardledger": {"checkpoint": {"async": True, "keep_last": 2}},
}


def train(asked: dict[str, str]) -> None:
    """What every worker runs."""
    device = get_device()
    engine, *_ = sl.initialize(model=GPT(SHAPE), config=CONFIG, device=device)
    engine.load_checkpoint(asked["checkpoints"])  # warns, and leaves everything as it is, when there is none yet
    rows = CONFIG["train_micro_batch_size_per_gpu"]
    while engine.global_steps < STEPS:
        draws = torch.Generator().manual_seed(engine.global_steps * engine.world + engine.rank)  # in place of your data
        text = torch.randint(SHAPE.vocabulary, (rows, SHAPE.context + 1), generator=draws).to(device)
        loss = engine(text[:, :-1], text[:, 1:])
        engine.backward(loss)
        engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(asked["checkpoints"])
        ray.train.report({"step": engine.global_steps, "loss": loss.item()})
    engine.destroy()


def main(folder: str) -> None:
    """Start the ranks; ``folder`` is on a file system that all machines share."""
    TorchTrainer(
        train,
        train_loop_config={"checkpoints": f"{folder}/checkpoints"},
        torch_config=TorchConfig(timeout_s=120),  # how long ranks wait for one that is lost: the group is Ray's
        scaling_config=ray.train.ScalingConfig(num_workers=16, use_gpu=True),
        run_config=ray.train.RunConfig(
            name="gpt", storage_path=folder, failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    ).fit()


if __name__ == "__main__":
    main(sys.argv[1])
