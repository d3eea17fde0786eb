"""Models that no machine here could hold, at world sizes that it does not have: predicted peaks, traffic, planning time.

    python benchmarks/scale.py [--write benchmarks/results/scale.md] [--cases 8b] [--without-fsdp2]

Ours: dry runs (``shardledger.plan``). FSDP2: its own ``FSDPMemTracker`` over a step on fake tensors with the ``fake``
process group. Both allocate nothing; each runs in a process of its own.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENS = 2048
VOCABULARY = 128_256
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"layers": 35, "heads": 32, "width": 4096},
    "70b": {"layers": 84, "heads": 64, "width": 8192},
}
"""With untied tables of a modern vocabulary: 8.1 and 69.8 billion parameters."""
TIMED_WORLDS = (8, 64, 512, 4096)


@dataclass(frozen=True)
class Scale:
    """One model at one world size."""

    model: str
    world: int


CASES = (Scale("8b", 8), Scale("8b", 64), Scale("8b", 512), Scale("70b", 512))


def make_model(name: str) -> Any:
    """The GPT of a shape, on whatever device is the default."""
    from shardledger.workload import GPT, GPTConfig

    return GPT(GPTConfig(**SHAPES[name], context=TOKENS, vocabulary=VOCABULARY, tied=False))


def ours(case: Scale, engine: str) -> dict[str, Any]:
    """Peak by category and bytes sent, of one rank, from a dry run with recomputation and one sequence per rank."""
    from shardledger.forecast import DEFAULT_CONFIG, Question, forecast

    question = Question(
        model=lambda: make_model(case.model),
        config=DEFAULT_CONFIG,
        world=case.world,
        micro_batches=(1,),
        seq_len=TOKENS,
        stages=(int(engine.split()[-1]),),
        checkpointing=(True,),
    )
    begin = time.perf_counter()
    row = next(row for row in forecast(question).rows if row.offload == "none")
    states = row.params + row.grads + row.master + row.optimizer
    return {
        "engine": engine,
        "peak": row.total,
        "states": states,
        "communication": row.communication,
        "rest": row.total - states - row.communication,
        "sent": row.sent_bytes_per_step,
        "where": f"{row.peak_phase} {row.peak_unit}".strip(),
        "seconds": time.perf_counter() - begin,
    }


def fsdp2(case: Scale) -> dict[str, Any]:
    """The same from FSDP2: bf16 compute and reduction, fp32 masters, blocks resharded and recomputed."""
    import torch
    import torch.distributed as dist
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin = time.perf_counter()
    dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())
    mesh = init_device_mesh("cpu", (case.world,))
    with FakeTensorMode(allow_non_fake_inputs=True):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = make_model(case.model)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
            fully_shard(model.blocks[index], mesh=mesh, mp_policy=policy)
        for table in (model.token_table, model.head):
            fully_shard(table, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)

        def step() -> None:
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the optimizer's states, which the tracker would count with the size of all ranks' together
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((tokens,))
        with tracker:
            step()
        peak = {getattr(k, "value", k): n for k, n in _only(tracker.get_tracker_snapshot("peak")).items()}
    states = sum(peak.get(name, 0) for name in ("Sharded Param", "Sharded Grad", "OptState", "Buffer"))
    moving = sum(peak.get(name, 0) for name in ("Unsharded Param", "Unsharded Grad", "All Gather", "Reduce Scatter"))
    return {
        "engine": "FSDP2",
        "peak": peak["Total"],
        "states": states,
        "communication": moving,
        "rest": peak["Total"] - states - moving,
        "sent": None,
        "where": "",
        "seconds": time.perf_counter() - begin,
    }


def planning(model: str) -> list[dict[str, Any]]:
    """Seconds to plan and to lay out, and to look up one rank's pieces, at growing world sizes."""
    from shardledger.config import load_config
    from shardledger.forecast import DEFAULT_CONFIG, describe_model
    from shardledger.layout.build import build_layout
    from shardledger.plan.build import build_plan

    spec = describe_model(lambda: make_model(model))
    rows = []
    for world in TIMED_WORLDS:
        config = {**DEFAULT_CONFIG, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        loaded = load_config(config, world=world, world_source="the benchmark")
        best = {"plan": float("inf"), "layout": float("inf"), "pieces": float("inf")}
        for _ in range(5):
            times = [time.perf_counter()]
            plan = build_plan(loaded, spec, world=world)
            times.append(time.perf_counter())
            layout = build_layout(plan, spec)
            times.append(time.perf_counter())
            count = sum(1 for flat in layout.flats for _ in flat.pieces(world // 2))
            times.append(time.perf_counter())
            took = dict(zip(best, (b - a for a, b in zip(times, times[1:], strict=False)), strict=True))
            best = {name: min(best[name], took[name]) for name in best}
        rows.append({"world": world, "pieces_of_one_rank": count, **best})
    return rows


def _only(snapshot: dict[Any, dict[Any, int]]) -> dict[Any, int]:
    """The one device that has bytes."""
    return max(snapshot.values(), key=lambda kinds: max(kinds.values(), default=0))


def document(results: list[tuple[Scale, list[dict[str, Any]]]], plans: list[dict[str, Any]]) -> str:
    """The table."""
    from importlib.metadata import version

    lines = [
        "# On paper: large models, many ranks",
        "",
        f"{datetime.date.today()}, PyTorch {version('torch')}; `python benchmarks/scale.py`. bf16 with fp32 masters, AdamW, "
        f"one sequence of {TOKENS} tokens per rank, blocks recomputed, vocabulary {VOCABULARY:,}, tables untied. Bytes of one "
        "rank at the moment of its peak. FSDP2 is told to make each table a group of its own; our planner does by itself. "
        "Ours from dry runs, FSDP2 from its FSDPMemTracker on fake tensors.",
        "",
        "| model | ranks | engine | peak | states | gathered and unreduced | activations, temporary | sent per step "
        "| peak in | took |",
        "|---|---:|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for case, rows in results:
        for row in rows:
            if "failed" in row:
                lines.append(f"| {case.model} | {case.world} | {row['engine']} | {row['failed']} | | | | | | |")
                continue
            cells = [_gib(row[key]) for key in ("peak", "states", "communication", "rest")]
            sent = "" if row["sent"] is None else f"{row['sent'] / 1e9:.1f} GB"
            lines.append(
                f"| {case.model} | {case.world} | {row['engine']} | " + " | ".join(cells) + f" | {sent} | "
                f"{row['where']} | {row['seconds']:.0f} s |"
            )
    lines += [
        "",
        "## What planning costs as ranks are added (8b, stage 3)",
        "",
        "Every rank computes this for itself; the best of five.",
        "",
        "| ranks | plan | layout | pieces of one rank | found in |",
        "|---:|---:|---:|---:|---:|",
    ]
    for row in plans:
        times = [f"{row[name] * 1e3:.1f} ms" for name in ("plan", "layout", "pieces")]
        lines.append(f"| {row['world']} | {times[0]} | {times[1]} | {row['pieces_of_one_rank']} | {times[2]} |")
    return "\n".join(lines) + "\n"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def apart(*question: str) -> Any:
    """One measurement in a process of its own, so that no process group or fake mode outlives it."""
    command = [sys.executable, "-W", "ignore", __file__, "--one", *question]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        return {"engine": question[0], "failed": (ran.stderr.strip().splitlines() or ["ended"])[-1][:200]}
    return json.loads(ran.stdout.strip().splitlines()[-1])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--cases", default="", help="parts of MODEL@RANKS, separated by commas: 8b@64")
    parser.add_argument("--stages", default="1,2,3")
    parser.add_argument("--without-fsdp2", action="store_true")
    parser.add_argument("--one", nargs="+", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        kind, *rest = asked.one
        answer = (
            planning(rest[0])
            if kind == "planning"
            else fsdp2(Scale(rest[0], int(rest[1])))
            if kind == "FSDP2"
            else ours(Scale(rest[0], int(rest[1])), kind)
        )
        print(json.dumps(answer))
        return
    texts = [text for text in asked.cases.split(",") if text]
    results = []
    for case in CASES:
        if texts and not any(text in f"{case.model}@{case.world}" for text in texts):
            continue
        engines = [f"shardledger stage {stage}" for stage in asked.stages.split(",")]
        engines += [] if asked.without_fsdp2 else ["FSDP2"]
        rows = []
        for engine in engines:
            rows.append(apart(engine, case.model, str(case.world)))
            print(case, rows[-1], flush=True)
        results.append((case, rows))
    text = document(results, apart("planning", "8b"))
    print(text)
    if asked.write:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
