"""The commands of ``shardledger``: options, and which exit code an error becomes.

torch takes seconds to import, so only the bodies of commands import it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from typing import Annotated, Optional

import typer

from shardledger.cli.arguments import with_resume_value
from shardledger.cli.checkpoint_commands import commands as checkpoint_commands
from shardledger.cli.exits import guarded as _guarded
from shardledger.cli.plan_command import plan
from shardledger.cli.settings import Options

app = typer.Typer(
    name="shardledger",
    help="Train PyTorch models with ZeRO stages 0-3, and account for every byte of training memory.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class Device(str, Enum):
    """Where to train."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Precision(str, Enum):
    """Number format of weights and activations."""

    fp32 = "fp32"
    bf16 = "bf16"


# typing.Optional rather than "str | None": typer before 0.12.4 does not read the latter on Python 3.10.
DataOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--data", metavar="FILE|DIR", help="Text file, or folder of text files. Default: Python's sources."),
]
DeviceOption = Annotated[Device, typer.Option("--device", help="auto takes CUDA when there is a device per rank.")]
RanksOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option("--nproc", min=1, help="Ranks to start. Default: 2 for demo and check, 1 for train."),
]
OutOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--out", metavar="DIR", help="Folder of the run, not used before. Default: runs/NAME-TIME."),
]
ResumeOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--resume",
        metavar="[auto|PATH]",
        help="Go on from the latest checkpoint of --out; auto: if there is one; PATH: a run folder or a checkpoint.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of the initial weights and of the data order.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps.")]


@app.command()
def demo(
    context: typer.Context,
    stage: Annotated[int, typer.Option("--stage", min=0, max=3, help="ZeRO stage.")] = 2,
    nproc: RanksOption = None,
    steps: StepsOption = 240,
    precision: Annotated[Precision, typer.Option("--precision", help="Number format.")] = Precision.fp32,
    data: DataOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    out: OutOption = None,
) -> None:
    """Train a byte-level GPT of about 1 M parameters on real text, its state sharded over two ranks."""

    def body() -> None:
        from shardledger.cli.settings import demo_settings
        from shardledger.cli.start import start

        options = Options(data=data, steps=steps, seed=seed, device=device.value, out=out, nproc=nproc)
        start(demo_settings(options, stage=stage, precision=precision.value), _arguments(context))

    _guarded(body)


@app.command()
def train(
    context: typer.Context,
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="DeepSpeed-style JSON.")],
    model: Annotated[str, typer.Option("--model", help="gpt:SIZE (1m, 25m, 124m, 350m) or package.module:function.")],
    data: DataOption = None,
    nproc: RanksOption = None,
    steps: StepsOption = 100,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Bytes per sequence.")] = 256,
    eval_every: Annotated[int, typer.Option("--eval-every", min=0, help="In steps; 0: only first and last.")] = 0,
    memory_budget: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--memory-budget", metavar="SIZE", help="Choose the stage: cheapest with a peak under it."),
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = Device.auto,
    out: OutOption = None,
    resume: ResumeOption = None,
    trace: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--trace", metavar="FILE", help="Where rank 0's time goes, for chrome://tracing; not written at Ctrl-C."
        ),
    ] = None,
) -> None:
    """Train your model with your config on your text; under torchrun or srun, be one of its ranks."""

    def body() -> None:
        from shardledger.cli.settings import train_settings, with_budget
        from shardledger.cli.start import start

        options = Options(data=data, steps=steps, seed=seed, device=device.value, out=out, nproc=nproc, resume=resume)
        options = replace(options, trace=trace)
        settings = train_settings(options, config=config, model=model, seq_len=seq_len, eval_every=eval_every)
        if memory_budget is not None:
            settings = with_budget(settings, memory_budget)
        start(settings, _arguments(context))

    _guarded(body)


@app.command()
def check(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="gpt:SIZE or package.module:function.")],
    config: Annotated[str, typer.Option("--config", metavar="FILE", help="DeepSpeed-style JSON.")],
    nproc: RanksOption = None,
    steps: StepsOption = 5,
    data: DataOption = None,
    seq_len: Annotated[int, typer.Option("--seq-len", min=1, help="Bytes per sequence.")] = 256,
    seed: SeedOption = 0,
    tolerance: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--tolerance", min=0.0, help="Allowed difference, relative. Default: measured, as rounding does."),
    ] = None,
    device: DeviceOption = Device.auto,
) -> None:
    """Compare your model on ranks with one plain PyTorch process, step by step; exit code 1 when they differ."""

    def body() -> None:
        from shardledger.cli.check import check_settings, start_check

        options = Options(data=data, steps=steps, seed=seed, device=device.value, out=None, nproc=nproc)
        settings = check_settings(options, config=config, model=model, seq_len=seq_len)
        start_check(settings, tolerance, _arguments(context))

    _guarded(body)


app.command()(plan)


@app.command()
def ledger(
    run: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="RUN_DIR", help="Folder of a finished run."),
    ] = None,
    rank: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--rank", min=0, help="Default: the rank whose total is predicted worst."),
    ] = None,
    verification: Annotated[Optional[str], typer.Option("--verification", hidden=True)] = None,  # noqa: UP045
) -> None:
    """Show a run's bytes by category, predicted beside measured, with the error in per cent."""

    def body() -> None:
        if verification is not None:  # one rank of `plan --verify`
            from pathlib import Path

            from shardledger.cli.verify import verify_rank

            verify_rank(Path(verification))
            return
        from shardledger.cli.exits import UsageFailure
        from shardledger.cli.ledger import show

        if run is None:
            raise UsageFailure("ledger needs the folder of a run, as in: shardledger ledger runs/demo-stage2-...")
        show(run, rank)

    _guarded(body)


app.add_typer(checkpoint_commands)


@app.command()
def env() -> None:
    """Print versions and hardware: paste it into a bug report."""

    def body() -> None:
        from shardledger.cli.environment import environment_report

        print(environment_report())

    _guarded(body)


def run(argv: Sequence[str] | None = None) -> None:
    """Entry point of the command; ends the process with the exit codes listed in this folder's README."""
    arguments = with_resume_value(list(sys.argv[1:] if argv is None else argv))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # --model package.module:function is looked up where the user stands
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a sampled text must not end a run on a terminal that is not UTF-8
    app(args=arguments, obj=arguments, prog_name="shardledger")


def _arguments(context: typer.Context) -> list[str]:
    """The command line as it was typed: what the ranks are started with."""
    return list(context.obj)
