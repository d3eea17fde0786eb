"""A data-parallel engine of plain PyTorch with the engine's method names: what the command line is tested against.

It shards nothing. With RANK in the environment it joins a gloo group, otherwise it is alone.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from shardledger.config import load_config
from shardledger.telemetry import CATEGORIES


class NoCheckpoints:
    def wait(self) -> None:
        pass

    def take_reports(self) -> list[Any]:
        return []


class StandInEngine:
    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.config = load_config(config, world=self.world)
        self.device = torch.device("cpu")
        self.module = model
        self.comm_wait_s = 0.0
        self.skipped_steps = self.global_steps = self.micro_steps = 0
        self.loss_scale = 1.0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.norm: float | None = None
        self.destroyed = False
        self.checkpoints = NoCheckpoints()

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        (loss / self.config.gradient_accumulation_steps).backward()
        return loss

    def step(self) -> None:
        self.micro_steps += 1
        if self.micro_steps % self.config.gradient_accumulation_steps:
            return
        gradients = [parameter.grad for parameter in self.module.parameters()]
        if self.world > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= self.world
        self.norm = torch.stack([gradient.norm() for gradient in gradients]).norm().item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.global_steps += 1

    def eval(self) -> None:
        self.module.eval()

    def train(self) -> None:
        self.module.train()

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return self.norm

    def zero_optimization_stage(self) -> int:
        return self.config.zero_optimization.stage

    def gather_scalars(self, values: list[float]) -> list[list[float]]:
        if self.world == 1:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(rows, own)
        return [row.tolist() for row in rows]

    def tier_traffic(self) -> dict[str, dict[str, float]]:
        numbers = ("read_bytes", "written_bytes", "wait_s", "busy_s")
        return {tier: dict.fromkeys(numbers, 0.0) for tier in ("host", "disk")}

    def ledger(self) -> dict[str, dict[str, int | None]]:
        known = {"params": 4 * sum(parameter.numel() for parameter in self.module.parameters()), "total": 2**33 + 1}
        return {
            "predicted": {category: known.get(category) for category in CATEGORIES},
            "measured": {category: known.get(category, 0) + self.rank for category in CATEGORIES},
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.module.state_dict()) if self.rank == 0 else {}

    def destroy(self) -> None:
        self.destroyed = True
        if dist.is_initialized():
            dist.destroy_process_group()


def initialize(*, model: torch.nn.Module, config: Any, device: str) -> tuple[StandInEngine, None, None, None]:
    assert device == "cpu"
    """Same call as the package's, for the arguments the command line uses."""
    return StandInEngine(model, config), None, None, None
