"""Finding the files of a DeepSpeed checkpoint, and saying what is wrong when they are not all there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardledger.checkpoint.folder import LATEST_NAME, complete_tags, is_complete
from shardledger.checkpoint.tools.find import did_you_mean
from shardledger.errors import CheckpointError

_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
#: What DeepSpeed can also write and this reader does not take apart: pattern of a name, and what it means.
_OTHERS = (
    (re.compile(r"(?:layer_\d+_)?expert_\d+_.*\.pt"), "experts of a mixture of experts"),
    (re.compile(r"layer_\d+-model.*\.pt"), "layers of a pipeline"),
    (re.compile(r"offloaded_tensors"), "optimizer states offloaded to NVMe"),
    (re.compile(r"zero"), "a universal checkpoint"),
)


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one tag."""

    folder: Path
    tag: str
    model: tuple[Path, ...]
    """One file (stages 1 and 2) or one per rank (stage 3), by rank."""
    optim: dict[int, Path]
    """By rank."""


def find_files(path: Path, tag: str | None = None) -> DeepSpeedFiles:
    """The files of ``tag`` (default: what ``latest`` names), below the folder DeepSpeed saved to or in the tag's own folder.

    Raises:
        CheckpointError: there is no DeepSpeed checkpoint, or it is of a kind that is not read.
    """
    folder = _tag_folder(path, tag)
    names = sorted(item.name for item in folder.iterdir())
    for pattern, meaning in _OTHERS:
        found = [name for name in names if pattern.fullmatch(name)]
        if found:
            raise CheckpointError(f"{folder} holds {meaning} ({found[0]}), which import does not read.")
    optim: dict[int, Path] = {}
    for name in names:
        match = _OPTIM.fullmatch(name)
        if match:
            rank = int(match[1])
            if rank in optim:
                raise CheckpointError(
                    f"{folder} holds the optimizer states of rank {rank} twice, {optim[rank].name} and {name}: it mixes two "
                    f"saves or uses model parallelism, which import does not read. Remove the files of the older save."
                )
            optim[rank] = folder / name
    model = {int(match[1] or 0): folder / name for name in names if (match := _MODEL.fullmatch(name))}
    parallel = {match[2] for name in names if (match := _OPTIM.fullmatch(name) or _MODEL.fullmatch(name))} - {"00"}
    if parallel:
        raise CheckpointError(
            f"{folder} holds model-parallel ranks {sorted(parallel | {'00'})}: tensor and pipeline parallelism are not read."
        )
    if not model:
        raise CheckpointError(
            f"{folder} has no *_model_states.pt"
            + (", only optimizer states: a file is missing." if optim else ": it is no DeepSpeed checkpoint.")
        )
    if not optim:
        raise CheckpointError(
            f"{folder} has no *_optim_states.pt: the files are missing, or it was saved without ZeRO (stage 0). import reads "
            f"stages 1, 2 and 3; for stage 0 load the key 'module' of {next(iter(model.values())).name} into your model."
        )
    return DeepSpeedFiles(folder, folder.name, tuple(model[rank] for rank in sorted(model)), optim)


def _tag_folder(path: Path, tag: str | None) -> Path:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist.{did_you_mean(path)}")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder that DeepSpeed's save_checkpoint was called with.")
    tags = sorted(item.name for item in path.iterdir() if item.is_dir() and _is_tag(item))
    if tag is not None:
        if tag not in tags:
            raise CheckpointError(f"{path} has no DeepSpeed checkpoint {tag!r}; there: {', '.join(tags) or 'none'}.")
        return path / tag
    if _is_tag(path):
        return path
    if not tags:
        raise CheckpointError(f"{path} {_what_it_is(path)}")
    latest = path / LATEST_NAME
    if not latest.is_file():
        raise CheckpointError(
            f"{path} has no file 'latest'; give one of its checkpoints with --tag: {', '.join(tags)}."
        )
    named = latest.read_text(encoding="utf-8", errors="replace").strip()
    if named not in tags:
        raise CheckpointError(f"{latest} names {named!r}, which is not there: {', '.join(tags)}. Give one with --tag.")
    return path / named


def _what_it_is(path: Path) -> str:
    if is_complete(path) or complete_tags(path) or complete_tags(path / "checkpoints"):
        return "holds a shardledger checkpoint already; load it as it is."
    items = sorted(path.iterdir())
    if not items:
        return "is empty; give the folder that DeepSpeed's save_checkpoint was called with."
    inner = [item for item in items if item.is_dir() and any(_is_tag(tag) for tag in item.iterdir() if tag.is_dir())]
    if inner:
        return f"has no DeepSpeed checkpoint in it. Did you mean {inner[0]}?"
    if (path / LATEST_NAME).is_file():
        return f"has a file 'latest', but the checkpoint it names is not there ({(path / LATEST_NAME).read_text().strip()!r})."
    return "has no DeepSpeed checkpoint in it; give the folder that DeepSpeed's save_checkpoint was called with."


def _is_tag(folder: Path) -> bool:
    return any(_MODEL.fullmatch(item.name) or _OPTIM.fullmatch(item.name) for item in folder.iterdir())
