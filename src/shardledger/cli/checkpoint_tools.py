"""The bodies of ``inspect``, ``verify``, ``diff`` and ``export``: open, ask the checkpoint room, print."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardledger.cli.exits import RunFailure, UsageFailure
from shardledger.errors import CheckpointError

if TYPE_CHECKING:
    from shardledger.checkpoint.tools.diff import TensorDifference
    from shardledger.checkpoint.tools.find import Stored

SHOWN = 20
"""Lines of a list that are printed."""


@dataclass(frozen=True)
class ExportRequest:
    """The options of ``export``."""

    checkpoint: str
    out: str
    dtype: str
    shard_size: str
    config: str | None
    tied: bool


def run_inspect(checkpoint: str, other: str | None, as_json: bool) -> None:
    """Print what is in a checkpoint, or in what two differ."""
    from shardledger.checkpoint.tools.inspect import describe, differences

    stored = open_stored(checkpoint)
    facts = describe(stored)
    if other is None:
        print_json(facts) if as_json else print("\n".join(_fact_lines(facts)))
        return
    second = open_stored(other)
    changed = differences(stored.manifest, second.manifest)
    if as_json:
        print_json({"a": facts, "b": describe(second), "differences": {k: list(v) for k, v in changed.items()}})
        return
    print(f"A: {stored.folder}\nB: {second.folder}")
    width = max((len(key) for key in changed), default=0)
    for key, (one, two) in changed.items():
        print(f"  {key:<{width}}  {_value(one)} -> {_value(two)}")
    if not changed:
        print("  no difference in step, stage, ranks, versions or configuration")


def run_verify(checkpoint: str, as_json: bool) -> None:
    """Read every file.

    Raises:
        RunFailure: it is damaged.
    """
    from shardledger.checkpoint.tools.verify import verify

    try:
        stored = open_stored(checkpoint)
    except RunFailure as error:  # a manifest that cannot be read is damage, too
        if as_json:
            print_json({"path": checkpoint, "whole": False, "problems": [str(error)], "damaged": ["manifest.json"]})
        raise
    verdict = verify(stored)
    if as_json:
        print_json({"path": str(stored.folder), "whole": not verdict.problems, **asdict(verdict)})
    for name in () if as_json else verdict.unknown[:SHOWN]:
        print(f"note: {name} is not part of the checkpoint")
    if not verdict.problems:
        if not as_json:
            what = f"{count(verdict.files, 'file')}, {readable(verdict.bytes)}"
            print(f"{stored.folder} is whole: {what}, every element of every tensor once")
        return
    lines = _shortened([f"  {problem}" for problem in verdict.problems])
    head = f"{stored.folder} is damaged ({count(len(verdict.problems), 'problem')}):"
    raise RunFailure("\n".join([head, *lines, "Resume from another checkpoint, or restore the files from a copy."]))


def run_diff(paths: tuple[str, str], weights: bool, tolerance: float, as_json: bool) -> None:
    """Compare two checkpoints.

    Raises:
        RunFailure: they differ.
    """
    from shardledger.checkpoint.tools.diff import compare

    one, other = (open_stored(path) for path in paths)
    found = list(compare(one, other, weights_only=weights, tolerance=tolerance))
    if as_json:
        rows = [_difference_row(item) for item in found]
        print_json({"a": str(one.folder), "b": str(other.folder), "equal": not found, "differences": rows})
    elif not found:
        what = "weights and buffers" if weights else "weights, buffers and optimizer states"
        how = "are equal to the bit" if tolerance == 0 else f"differ by at most {tolerance:g}"
        print(f"A: {one.folder}\nB: {other.folder}\n{what} {how}")
    else:
        print(f"A: {one.folder}\nB: {other.folder}")
        print("\n".join(_difference_lines(found)))
    if found:
        raise RunFailure("1 tensor differs." if len(found) == 1 else f"{len(found):,} tensors differ.")


def run_export(request: ExportRequest, as_json: bool) -> None:
    """Write the weights to a new folder.

    Raises:
        UsageFailure: a path or a size that cannot be used.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    import torch

    from shardledger.checkpoint.tools.export import check_out, export, parse_size

    stored = open_stored(request.checkpoint)
    out = Path(request.out)
    try:
        check_out(out)
        shard_bytes = parse_size(request.shard_size)
        config = _model_config(stored, request.config)
    except CheckpointError as error:
        raise UsageFailure(str(error)) from None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[request.dtype]
    done = export(stored, out, dtype=dtype, shard_bytes=shard_bytes, config=config, tied=request.tied)
    if as_json:
        print_json({"path": str(out), "from": str(stored.folder), "step": stored.manifest.step, **asdict(done)})
        return
    print(
        f"wrote {out}: {count(done.tensors, 'tensor')} of step {stored.manifest.step} in {request.dtype}, "
        f"{readable(done.bytes)} in {count(len([f for f in done.files if f.endswith('.safetensors')]), 'file')}"
        + (", config.json" if done.config else "")
    )
    for note in done.notes:
        print(f"note: {note}")


def open_stored(path: str) -> Stored:
    """The checkpoint that a path means.

    Raises:
        UsageFailure: there is none.
        RunFailure: there is one, and its manifest is damaged.
    """
    from shardledger.checkpoint.tools.find import find_checkpoint, open_checkpoint

    try:
        folder = find_checkpoint(Path(path))
    except CheckpointError as error:
        raise UsageFailure(str(error)) from None
    try:
        return open_checkpoint(folder)
    except CheckpointError as error:
        raise RunFailure(str(error)) from None


def print_json(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output; what JSON has no word for (inf) becomes text."""
    print(json.dumps(_plain(value), indent=2))


def readable(size: int) -> str:
    """Bytes in the largest unit that leaves a number of at least one."""
    amount, unit = float(size), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{size} bytes" if unit == "bytes" else f"{amount:.1f} {unit}"


def count(number: int, what: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# --- lines -----------------------------------------------------------------------------------------------------------


def _fact_lines(facts: Mapping[str, Any]) -> list[str]:
    parameters, optimizer = facts["parameters"], facts["optimizer"]
    tied = [f"{other} = {name}" for other, name in parameters["tied"].items()]
    samples, after = facts["counters"].get("global_samples", 0), facts["micro_batches_after_step"]
    rows = [
        ("checkpoint", facts["path"]),
        (
            "step",
            f"{facts['step']:,}  ({samples:,} samples{f', {after} micro-batches into the next' if after else ''})",
        ),
        ("stage", str(facts["stage"])),
        ("ranks", str(facts["world"])),
        ("precision", facts["precision"]),
        ("parameters", f"{parameters['elements']:,} in {count(parameters['tensors'], 'tensor')}"),
        ("trained", f"{parameters['trained_elements']:,} in {count(parameters['trained_tensors'], 'tensor')}"),
        ("tied", ", ".join(_shortened(tied)) or "none"),
        ("versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())),
    ]
    if optimizer:
        rows.append(("optimizer", f"{optimizer['class']} ({', '.join(optimizer['states']) or 'no states yet'})"))
        for index, group in enumerate(optimizer["param_groups"]):
            options = ", ".join(f"{k} {_value(v)}" for k, v in group.items() if k != "tensors")
            rows.append((f"  group {index}", f"{count(group['tensors'], 'tensor')}: {options}"))
    for name in ("scheduler", "loss_scale", "data"):
        if facts[name] is not None:
            rows.append((name.replace("_", " "), _value(facts[name])))
    rows.append(("bytes", f"{readable(facts['bytes']['total'])} in {count(facts['files'], 'file')}"))
    rows += [(f"  {name}", readable(size)) for name, size in facts["bytes"].items() if name != "total" and size]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _difference_lines(found: list[TensorDifference]) -> list[str]:
    """Missing ones first, then by size."""
    ordered = sorted(found, key=lambda item: (item.largest is not None, -(item.largest or 0.0), item.name, item.role))
    lines = []
    for item in ordered:
        if item.largest is None:
            lines.append(f"  {item.name} ({item.role}): {item.why}")
        else:
            where = f" at {list(item.at)}" if item.at else ""
            values = f": {item.values[0]} and {item.values[1]}" if item.values else ""
            lines.append(f"  {item.name} ({item.role}): {item.largest:.3g}{where}{values}")
    return _shortened(lines)


def _difference_row(item: TensorDifference) -> dict[str, Any]:
    row = {key: value for key, value in asdict(item).items() if value not in (None, "")}
    return {**row, "at": list(item.at)} if item.at is not None else row


def _shortened(lines: list[str]) -> list[str]:
    more = len(lines) - SHOWN
    return lines if more <= 0 else [*lines[:SHOWN], f"  … and {more} more (--json lists all)"]


def _value(value: Any) -> str:
    if value is None:
        return "(not set)"
    return value if isinstance(value, str) else json.dumps(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


def _model_config(stored: Stored, given: str | None) -> dict[str, Any] | None:
    """The text for ``config.json``: from ``--config``, or what the checkpoint keeps of the model.

    Raises:
        CheckpointError: the given file is none.
    """
    from shardledger.checkpoint.tools.export import stored_config

    if given is None:
        return stored_config(stored)
    path = Path(given)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"--config: {file} does not exist.")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"--config: {file} is not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"--config: {file} holds no JSON object.")
    return content
