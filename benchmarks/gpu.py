"""One GPU, six minutes: stages 0 to 3 beside DDP and FSDP2, the allocator's peak beside the prediction, and traces.

    python benchmarks/gpu.py [--write benchmarks/results/gpu.md] [--traces DIR]
    python benchmarks/gpu.py --device cpu      the same with toy sizes, where there is no GPU

One rank over NCCL. With one rank nothing is saved by sharding: what is seen is what the machinery costs, and whether the
ledger is right about a real allocator. A few lines say how far the prediction is off; it leaves out workspaces of kernels
(cuBLAS keeps some tens of MB) and rounds nothing up to blocks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from side_by_side.cases import ADAMW, DDP, OURS, SHAPES, Case, Contender
from side_by_side.conductor import Measured, Protocol, conduct
from side_by_side.crew import Crew, CrewError
from side_by_side.report import disagreements, table

KEPT, RESHARDED = Contender("FSDP2", 3, "kept"), Contender("FSDP2", 3, "resharded")


@dataclass(frozen=True)
class Part:
    """One table."""

    case: Case
    contenders: tuple[Contender, ...]
    protocol: Protocol


def parts(device: str) -> list[Part]:
    """Everything that is measured: sizes for a GPU with 80 GB or more, or toys."""
    everyone = (*OURS, DDP, KEPT, RESHARDED)
    few = (OURS[0], OURS[3], DDP, RESHARDED)
    quick = Protocol(rounds=5, starts=1, saves=1)
    if device == "cpu":
        toy = Case(model="tiny", world=1, precision="bf16", steps=2)
        return [Part(toy, few, Protocol(rounds=2, starts=1, saves=1))]
    shape: dict[str, Any] = {"world": 1, "device": "cuda"}
    medium = [
        Case(model="124m", precision=precision, steps=10, sequences=8, length=1024, **shape)
        for precision in ("fp32", "bf16")
    ]
    large = Case(model="1.3b", precision="bf16", steps=5, sequences=4, length=2048, alive=False, **shape)
    return [*(Part(case, everyone, quick) for case in medium), Part(large, few, Protocol(rounds=2, saves=0))]


def predicted(case: Case, stages: list[int]) -> dict[int, int]:
    """Peak bytes of each stage from a dry run."""
    import shardledger as sl
    from shardledger.workload import GPT, GPTConfig

    config = {
        "bf16": {"enabled": case.precision == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
    }
    shape = GPTConfig(**SHAPES[case.model])
    plan = sl.plan(
        lambda: GPT(shape),
        config,
        world_size=1,
        micro_batch=case.sequences,
        seq_len=case.length,
        device=case.device,
    )
    rows = [row for row in plan.rows if row.offload == "none" and not row.checkpointing]
    return {row.stage: row.total for row in rows if row.stage in stages}


def memory_table(case: Case, rows: list[Measured], forecast: dict[int, int]) -> list[str]:
    """Prediction beside measurement of each stage."""
    what = "allocator's peak" if case.device == "cuda" else "peak resident set above imports (not the same thing)"
    lines = [f"| engine | predicted | {what} | error |", "|---|---:|---:|---:|"]
    for row in rows:
        if row.contender.engine == "shardledger" and not row.failed and row.contender.stage in forecast:
            expected = forecast[row.contender.stage]
            error = 100 * (expected / row.peak_bytes - 1)
            lines.append(
                f"| {row.contender.label} | {expected / 1e6:.1f} MB | {row.peak_bytes / 1e6:.1f} MB | {error:+.2f} % |"
            )
    return lines


def trace(case: Case, contender: Contender, folder: Path) -> list[str]:
    """Chrome trace of three steps into ``folder``; the operators that took longest."""
    crew = Crew(case, contender)
    try:
        crew.ask("first")
        crew.ask("turn", 2, 1)
        name = f"{contender.label}-{case.model}-{case.precision}".replace(" ", "-")
        text = crew.ask("trace", 3, str(folder / f"{name}.json"))[0]["text"]
    except CrewError as error:
        return [f"{contender.label}: no trace: {error}"]
    finally:
        crew.end()
    return [
        f"### {contender.label}, {case.title}",
        "",
        "```",
        *(line[:160] for line in text.splitlines()[:26]),
        "```",
        "",
    ]


def apart(case: Case, stages: list[int]) -> dict[int, int]:
    """``predicted`` in another process, so that the GPU's memory is the engines' alone."""
    index = [part.case for part in parts(case.device)].index(case)
    command = [sys.executable, "-W", "ignore", __file__, "--device", case.device, "--predict", str(index)]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        print(f"no prediction: {ran.stderr[-1500:]}", flush=True)
        return {}
    return {int(stage): total for stage, total in json.loads(ran.stdout.splitlines()[-1]).items()}


def device_name(device: str) -> str:
    """What the results were measured on."""
    import torch

    version = torch.__version__
    if device == "cpu":
        return f"CPU, toy sizes, PyTorch {version}"
    return f"{torch.cuda.get_device_name()}, PyTorch {version}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--traces", type=Path, default=None, help="folder for Chrome traces")
    parser.add_argument("--predict", type=int, default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.predict is not None:
        print(json.dumps(predicted(parts(asked.device)[asked.predict].case, [0, 1, 2, 3])))
        return
    begin = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begin:6.0f} s  {text}", flush=True)

    lines = ["# One GPU", "", f"{datetime.date.today()} · {device_name(asked.device)} · `python benchmarks/gpu.py`", ""]
    for part in parts(asked.device):
        say(part.case.title)
        rows = conduct(part.case, part.contenders, part.protocol, say)
        stages = [c.stage for c in part.contenders if c.engine == "shardledger" and c.stage is not None]
        forecast = apart(part.case, stages)
        lines += [f"## {part.case.title}, {part.case.sequences} x {part.case.length} tokens", ""]
        lines += [*table(part.case, rows), "", *memory_table(part.case, rows, forecast), ""]
        if disagreements(part.case, rows):
            say("the engines did not train alike")
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        case = parts(asked.device)[0].case
        lines += ["## Where three steps go", ""]
        for contender in (OURS[3], RESHARDED):
            say(f"trace of {contender.label}")
            lines += trace(case, contender, folder.resolve())
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.write:
        asked.write.parent.mkdir(parents=True, exist_ok=True)
        asked.write.write_text(text, encoding="utf-8")
    say("done")


if __name__ == "__main__":
    main()
