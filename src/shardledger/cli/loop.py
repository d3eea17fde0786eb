"""The training loop of ``demo`` and ``train``: batches in, records out.

It is written against the engine's public methods only, so it is also an example of how to use them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardledger.cli.run_checkpoints import RunCheckpoints
from shardledger.cli.stop import StopRequest
from shardledger.telemetry import EvalRecord, MemoryMeter, SinkGroup, StepRecord
from shardledger.telemetry.bottleneck import Bottleneck
from shardledger.workload import BatchSampler, TextData, loss_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardledger.cli.live_count import LiveCount

EVAL_BATCH = 8  # rows at a time
EVAL_ROWS = 128  # held-out sequences in all, over all ranks


@dataclass(frozen=True, kw_only=True)
class _Timing:
    """Seconds of this rank's step: all of it, waiting for data, waiting for other ranks."""

    step_s: float
    data_s: float
    comm_wait_s: float


class TrainingLoop:
    """Steps and evaluations of one engine on one text. All ranks run it; only rank 0 writes to ``sinks``."""

    def __init__(
        self, engine: Any, text: TextData, sampler: BatchSampler, sinks: SinkGroup, count: LiveCount | None = None
    ) -> None:
        self.engine = engine
        self.count = count
        self.sampler = sampler
        self.sinks = sinks
        self.meter = MemoryMeter(engine.device)
        self.eval_batches = text.validation_batches(EVAL_ROWS, EVAL_BATCH, engine.rank, engine.world)
        self.offload = _offload(engine.config)
        self.stop: StopRequest | None = None
        self.stopping = False
        """Whether a rank was asked to stop; known to all at the end of the step."""
        self._device_utilization = _device_utilization(engine.device)
        self._bottleneck = Bottleneck()
        self._offloads = any(home != "none" for home in self.offload.values())

    def run(
        self,
        steps: int,
        eval_every: int,
        *,
        begin: int = 0,
        checkpoints: RunCheckpoints | None = None,
        stop: StopRequest | None = None,
    ) -> tuple[float, float]:
        """Train until step ``steps``, from step ``begin``; returns the validation loss before and after.

        Evaluates before the first step, after every ``eval_every`` steps (0: never in between) and after the last one.

        Raises:
            RunFailure: ``stop`` was requested on any rank; the run was saved.
        """
        self.stop = stop
        first = latest = self.evaluate(begin)
        for step in range(begin + 1, steps + 1):
            self.train_step(step)
            if self.stopping and checkpoints is not None:
                checkpoints.stop(step)
            if checkpoints is not None:
                checkpoints.after_step(step, last=step == steps)
            if step == steps or (eval_every and step % eval_every == 0):
                latest = self.evaluate(step)
        if checkpoints is not None:
            checkpoints.close()
        return first, latest

    def train_step(self, step: int) -> StepRecord:
        """One optimizer step and its record, equal on every rank except for times."""
        engine = self.engine
        begin = time.perf_counter()
        waited, skipped, scale = engine.comm_wait_s, engine.skipped_steps, engine.loss_scale
        moved = engine.tier_traffic()
        batches = self.sampler.next_batch()
        data_s = time.perf_counter() - begin
        rate = float(engine.get_lr()[0])  # the rate of this step; step() moves the scheduler on
        losses = []
        with self.count.step() if self.count is not None else nullcontext():
            while batches:
                inputs = self._on_device(*batches.pop(0))  # let go before the next ones are used
                loss = loss_of(engine(*inputs))
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
        loss = sum(map(float, losses)) / len(losses)  # waits for the device: the times below are of finished work
        step_s, comm_wait_s = time.perf_counter() - begin, engine.comm_wait_s - waited
        timing = _Timing(step_s=step_s, data_s=data_s, comm_wait_s=comm_wait_s)
        tiers = _since(moved, engine.tier_traffic())
        gathered = engine.gather_scalars(
            [
                loss,
                timing.data_s,
                timing.comm_wait_s,
                self._utilization(timing, sum(tier["wait_s"] for tier in tiers.values())),
                *(tier["wait_s"] for tier in tiers.values()),
                float(self.meter.peak_bytes()),
                float(self.stop is not None and self.stop.requested),
            ]
        )
        self.stopping = any(row[-1] for row in gathered)
        means = [sum(column) / len(gathered) for column in zip(*gathered, strict=True)]
        step_s = time.perf_counter() - begin  # with the exchange above, which ends when the slowest rank has come
        rows = self.sampler.shape.rows
        record = StepRecord(
            step=step,
            loss=means[0],
            lr=rate,
            grad_norm=engine.get_global_grad_norm(),
            tokens_per_s=rows * self.sampler.data.seq_len / step_s,
            samples_per_s=rows / step_s,
            step_s=step_s,
            data_s=means[1],
            comm_wait_s=means[2],
            utilization=means[3],
            memory_peak_bytes=tuple(int(row[-2]) for row in gathered),
            stage=engine.zero_optimization_stage(),
            offload=self.offload,
            skipped=engine.skipped_steps > skipped,
            loss_scale=scale,
            offload_wait_s=dict(zip(tiers, means[4:6], strict=True)) if self._offloads else None,
        )
        self.sinks.write(record)
        told = self._bottleneck.look(step_s, tiers)
        if told is not None and engine.rank == 0:
            print(told, flush=True)
        return record

    def evaluate(self, step: int) -> float:
        """Mean loss on the held-out text, the same number on every rank."""
        import torch

        begin = time.perf_counter()
        self.engine.eval()
        with torch.no_grad():
            losses = [float(loss_of(self.engine(*self._on_device(*batch)))) for batch in self.eval_batches]
        self.engine.train()
        gathered = self.engine.gather_scalars([sum(losses) / len(losses)])
        loss = sum(row[0] for row in gathered) / len(gathered)
        self.sinks.write(EvalRecord(step=step, loss=loss, seconds=time.perf_counter() - begin))
        return loss

    def _on_device(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return tokens.to(self.engine.device), targets.to(self.engine.device)

    def _utilization(self, timing: _Timing, offload_wait_s: float) -> float:
        """Share of 1 in which this rank's device worked: as the device reports it, else the time not spent waiting."""
        if self._device_utilization:
            import torch

            return torch.cuda.utilization(self.engine.device) / 100
        busy = 1 - (timing.data_s + timing.comm_wait_s + offload_wait_s) / timing.step_s
        return min(1.0, max(0.0, busy))


def _since(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    return {tier: {key: value - before[tier][key] for key, value in numbers.items()} for tier, numbers in now.items()}


def _device_utilization(device: torch.device) -> bool:
    """Whether the device reports its utilization; CUDA does through the optional package nvidia-ml-py."""
    if device.type != "cuda":
        return False
    import torch

    try:
        torch.cuda.utilization(device)
    except (ImportError, RuntimeError):
        return False
    return True


def _offload(config: Any) -> dict[str, str]:
    """Where optimizer states and parameters sleep: the device names of the config, "none" without offload."""
    zero = config.zero_optimization
    homes = {"optimizer": zero.offload_optimizer, "param": zero.offload_param}
    return {role: str(getattr(section, "device", None) or "none") for role, section in homes.items()}
