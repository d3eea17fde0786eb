"""``shardledger import``: a DeepSpeed checkpoint becomes one of ours."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardledger import __version__
from shardledger.cli.checkpoint_tools import count, print_json, readable
from shardledger.cli.exits import UsageFailure
from shardledger.errors import CheckpointError


@dataclass(frozen=True)
class ImportRequest:
    """The options."""

    source: str
    target: str
    tag: str | None
    optimizer: str | None
    inert: tuple[str, ...]
    checksums: bool


def run_import(request: ImportRequest, as_json: bool) -> None:
    """Convert and say what was found.

    Raises:
        UsageFailure: the target cannot be used.
        CheckpointError: the source is not a checkpoint that can be read, or is damaged.
    """
    from shardledger.checkpoint.deepspeed import open_deepspeed
    from shardledger.checkpoint.deepspeed_files import find_files
    from shardledger.checkpoint.deepspeed_import import check_target, import_deepspeed

    target = Path(request.target)
    try:
        check_target(target, find_files(Path(request.source), request.tag).tag)
    except CheckpointError as error:
        raise UsageFailure(str(error)) from None
    source = open_deepspeed(Path(request.source), request.tag, inert=request.inert, checksums=request.checksums)
    done = import_deepspeed(source, target, optimizer_class=request.optimizer, version=__version__)
    facts, manifest = source.facts, done.manifest
    if as_json:
        print_json(
            {
                "source": str(source.folder),
                "deepspeed": facts.version,
                "stage": facts.stage,
                "world": facts.world,
                "step": facts.global_steps,
                "path": str(done.folder),
                "bytes": manifest.bytes,
                "parameters": sum(p.numel for p in manifest.parameters),
                "optimizer": manifest.optimizer.class_name if manifest.optimizer else None,
                "notes": list(done.notes),
            }
        )
        return
    print(
        f"read {source.folder}: DeepSpeed {facts.version}, stage {facts.stage}, {count(facts.world, 'rank')}, "
        f"step {facts.global_steps}, {manifest.precision}"
    )
    print(
        f"wrote {done.folder}: {sum(p.numel for p in manifest.parameters):,} parameters, "
        f"{manifest.optimizer.class_name if manifest.optimizer else 'no optimizer'}, {readable(manifest.bytes)}"
    )
    for note in done.notes:
        print(f"note: {note}.")
    print("note: DeepSpeed saves no random numbers and no data position: continue your data at the step above.")
    print(f'load it with engine.load_checkpoint("{target}")')
