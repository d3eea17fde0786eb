"""``shardledger inspect | verify | export | diff | import``: options only; ``checkpoint_tools.py`` does the work.

Merged into the main command by ``main.py``.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Optional

import typer

from shardledger.cli.exits import guarded

commands = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_PLACE = "A checkpoint's folder, a folder of checkpoints (its latest), or a run's folder."
CheckpointArgument = Annotated[str, typer.Argument(metavar="CKPT", help=_PLACE)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


class ExportDtype(str, Enum):
    """Number format of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"


@commands.command("inspect")
def inspect_(
    checkpoint: CheckpointArgument,
    other: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[OTHER]", help="A second checkpoint: show what differs between the two runs."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is in a checkpoint: step, stage, ranks, bytes by category, settings."""

    def body() -> None:
        from shardledger.cli.checkpoint_tools import run_inspect

        run_inspect(checkpoint, other, as_json)

    guarded(body)


@commands.command()
def verify(checkpoint: CheckpointArgument, as_json: JsonOption = False) -> None:
    """Read every file of a checkpoint: checksums, and every element exactly once; exit code 1 when it is damaged."""

    def body() -> None:
        from shardledger.cli.checkpoint_tools import run_verify

        run_verify(checkpoint, as_json)

    guarded(body)


@commands.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help=_PLACE)],
    other: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare it with.")],
    weights: Annotated[bool, typer.Option("--weights", help="Leave optimizer states out.")] = False,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0.0, help="Allowed absolute difference.")] = 0.0,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever their ranks and stages; exit code 1 when they differ."""

    def body() -> None:
        from shardledger.cli.checkpoint_tools import run_diff

        run_diff((one, other), weights, tolerance, as_json)

    guarded(body)


@commands.command()
def export(
    checkpoint: CheckpointArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder.")],
    dtype: Annotated[ExportDtype, typer.Option("--dtype", help="Number format of the weights.")] = ExportDtype.fp32,
    shard_size: Annotated[str, typer.Option("--shard-size", metavar="SIZE", help="Most bytes in a file.")] = "5GB",
    config: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--config", metavar="FILE|DIR", help="config.json to put beside. Default: the model's own."),
    ] = None,
    drop_tied: Annotated[bool, typer.Option("--drop-tied", help="Write a tied weight under one name only.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the weights as Hugging Face's libraries and plain PyTorch read them: safetensors and config.json."""

    def body() -> None:
        from shardledger.cli.checkpoint_tools import ExportRequest, run_export

        run_export(ExportRequest(checkpoint, out, dtype.value, shard_size, config, not drop_tied), as_json)

    guarded(body)


@commands.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="DEEPSPEED_DIR", help="What DeepSpeed's save_checkpoint was given.")],
    target: Annotated[str, typer.Argument(metavar="CKPT_DIR", help="A new folder for the converted checkpoint.")],
    tag: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--tag", help="Which checkpoint. Default: the one that 'latest' names."),
    ] = None,
    optimizer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--optimizer", metavar="CLASS", help="torch.optim class, where the script made it itself."),
    ] = None,
    inert: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--inert", metavar="CLASS", help="Class in the client state to leave out. May be repeated."),
    ] = None,
    checksums: Annotated[bool, typer.Option("--checksums/--no-checksums", help="Check every record's CRC-32.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Convert a DeepSpeed checkpoint (ZeRO 1, 2 or 3) to one that loads here on any number of ranks."""

    def body() -> None:
        from shardledger.cli.checkpoint_import import ImportRequest, run_import

        run_import(ImportRequest(source, target, tag, optimizer, tuple(inert or ()), checksums), as_json)

    guarded(body)
