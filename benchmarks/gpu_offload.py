"""Offload on one GPU, in a few minutes: device memory and step time without offload, with ours, and with FSDP2's.

    python benchmarks/gpu_offload.py [--model gpt:350m] [--rounds 5] [--trace trace.json] [--device cuda]

All engines take the same steps in turn, a step each; peaks are of the allocator, from one untimed step of each alone.
``--device cpu`` runs the same program on the CPU, to try it out; FSDP2 offloads on an accelerator only and is left out there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import shardledger as sl
from shardledger.workload import load_model, loss_of

TOKENS, SEQUENCES = 256, 4

Step = Callable[[torch.Tensor, torch.Tensor], None]


def ours(model: str, device: str, zero: dict[str, Any]) -> Step:
    """A step of shardledger at stage 3, bf16 with fp32 masters."""
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, **zero},
    }
    engine = sl.initialize(model=load_model(model, TOKENS), config=config, device=device)[0]

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        engine.backward(loss_of(engine(inputs, targets)))
        engine.step()

    return step


def fsdp2(model: str, device: str, *, offload: bool) -> Step:
    """A step of FSDP2 with fp32 parameters that compute in bf16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    torch.manual_seed(0)
    module = load_model(model, TOKENS).to("cpu" if offload else device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    placed = CPUOffloadPolicy() if offload else OffloadPolicy()
    for block in module.blocks:
        fully_shard(block, mp_policy=policy, offload_policy=placed)
    fully_shard(module, mp_policy=policy, offload_policy=placed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss_of(module(inputs, targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    """Print a table; write a trace when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt:350m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trace")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    folder = tempfile.mkdtemp(prefix="shardledger-benchmark-")
    disk = {"device": "nvme", "nvme_path": folder}
    makers: dict[str, Callable[[], Step]] = {
        "no offload": lambda: ours(options.model, options.device, {}),
        "optimizer: cpu": lambda: ours(options.model, options.device, {"offload_optimizer": {"device": "cpu"}}),
        "optimizer and params: cpu": lambda: ours(
            options.model, options.device, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        ),
        "optimizer: nvme": lambda: ours(options.model, options.device, {"offload_optimizer": disk}),
    }
    if cuda:
        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29655", rank=0, world_size=1)
        makers["FSDP2"] = lambda: fsdp2(options.model, options.device, offload=False)
        makers["FSDP2, CPUOffloadPolicy"] = lambda: fsdp2(options.model, options.device, offload=True)
    steps, peaks = {}, {}
    for name, make in makers.items():
        before = torch.cuda.memory_allocated() if cuda else 0
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        steps[name] = make()
        timed(steps[name], options.device)
        timed(steps[name], options.device)
        peaks[name] = torch.cuda.max_memory_allocated() - before if cuda else 0
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds):
        for name, step in steps.items():
            seconds[name].append(timed(step, options.device))
    base = statistics.median(seconds["no offload"])
    print(f"{options.model}, {SEQUENCES} x {TOKENS} tokens, stage 3, bf16, one rank on {options.device}")
    print("| engine | peak MiB | step ms | of no offload |\n|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"| {name} | {peaks[name] / 2**20:.0f} | {1000 * median:.0f} | {median / base:.2f} |")
    if options.trace:
        with torch.profiler.profile() as profile:
            timed(steps["optimizer and params: cpu"], options.device)
        profile.export_chrome_trace(options.trace)


def timed(step: Step, device: str) -> float:
    """Seconds of one step on random tokens."""
    tokens = torch.randint(0, 256, (SEQUENCES, TOKENS + 1), device=device)
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step(tokens[:, :-1], tokens[:, 1:])
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
