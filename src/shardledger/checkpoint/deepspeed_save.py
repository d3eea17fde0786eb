"""DeepSpeed's files of one save taken together: where the flat tensors are, and whether the files belong together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardledger.checkpoint.deepspeed_files import DeepSpeedFiles
from shardledger.checkpoint.deepspeed_layout import GroupLayout, parameter_by_parameter, whole_group
from shardledger.errors import CheckpointError


def optimizer_dict(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's dict, after refusing forms that are not read."""
    state = content.get("optimizer_state_dict")
    if not isinstance(state, dict) or not ("fp32_flat_groups" in state or "single_partition_of_fp32_groups" in state):
        raise CheckpointError(f"{file} holds no optimizer of ZeRO stages 1 to 3.")
    if "ds_zero_partition_groups" in state:
        raise CheckpointError(
            f"{file}: its experts are split over groups of ranks (AutoEP), which import does not read."
        )
    if isinstance(state.get("base_optimizer_state"), list):
        raise CheckpointError(
            f"{file} was saved with zero_optimization.elastic_checkpoint, which leaves the param groups out. Load it in "
            f"DeepSpeed and save it again without that key."
        )
    return {**state, "ds_version": content.get("ds_version"), "ds_config": content.get("ds_config")}


def check_ranks(files: DeepSpeedFiles, optim: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise CheckpointError unless the optimizer files are those of ranks 0 to world-1 of one save."""
    said = {}
    for rank, state in optim.items():
        count = state.get("partition_count", len(optim))
        said[rank] = max(count) if isinstance(count, (list, tuple)) else int(count)
    world = max(said.values())
    missing = sorted(set(range(world)) - set(optim))
    if missing:
        raise CheckpointError(
            f"{files.folder} was saved by {world} ranks, but the optimizer states of rank{'s' * (len(missing) > 1)} "
            f"{', '.join(map(str, missing))} are missing; there are {len(optim)} *_optim_states.pt. Copy them from the "
            f"machines that hold them: DeepSpeed writes each on its own rank's disk."
        )
    if len(set(said.values())) > 1 or len(optim) != world:
        listed = ", ".join(f"{files.optim[rank].name}: {count}" for rank, count in sorted(said.items()))
        raise CheckpointError(
            f"{files.folder} mixes saves of different numbers of ranks ({listed}; {len(optim)} files). Remove the files of the "
            f"other save."
        )


def check_worlds(files: DeepSpeedFiles, model: list[dict[str, Any]], world: int) -> None:
    """Raise CheckpointError unless the model files are there and of the same number of ranks as the optimizer files."""
    for file, state in zip(files.model, model, strict=True):
        said = state.get("dp_world_size", world)
        if said != world:
            raise CheckpointError(
                f"{file} was saved by {said} ranks, the optimizer states beside it by {world}. The files are of "
                f"different saves."
            )
    per_rank = files.model[0].name.startswith("zero_")
    if per_rank and len(model) != world:
        there = [int(file.name.split("_")[3]) for file in files.model]
        missing = sorted(set(range(world)) - set(there))
        raise CheckpointError(
            f"{files.folder} was saved by {world} ranks, but {len(model)} *_model_states.pt are there"
            + (f"; missing: ranks {', '.join(map(str, missing))}." if missing else ".")
        )


def masters(optim: Mapping[str, Any]) -> list[torch.Tensor]:
    """One rank's flat tensors of master weights, 1-D."""
    flats = optim.get("fp32_flat_groups")
    return flats if flats is not None else optim["single_partition_of_fp32_groups"]


def inner_state(optim: Mapping[str, Any]) -> Mapping[str, Any]:
    """The torch optimizer's own state dict."""
    return optim["optimizer_state_dict"] if "fp32_flat_groups" in optim else optim["base_optimizer_state"]


def state_of(optim: Mapping[str, Any], flat: int) -> Mapping[str, Any]:
    """States of one flat tensor. Stage 3 numbers them like the flat tensors, stages 1 and 2 have one per param group."""
    inner = inner_state(optim)
    index = flat if "fp32_flat_groups" in optim else inner["param_groups"][flat]["params"][0]
    return inner["state"].get(index, {})


def group_layouts(files: DeepSpeedFiles, first: Mapping[str, Any], optim: list[dict[str, Any]]) -> list[GroupLayout]:
    """The layout of every flat tensor; raises CheckpointError where the files contradict it."""
    shapes, world = first["param_shapes"], len(optim)
    counts = {len(masters(state)) for state in optim}
    if counts != {len(shapes)}:
        raise CheckpointError(
            f"{files.folder}: the model file lists {len(shapes)} groups of parameters, the optimizer files hold "
            f"{sorted(counts)}."
        )
    layouts = []
    for index, group in enumerate(shapes):
        if "fp32_flat_groups" in optim[0]:
            layout = parameter_by_parameter(group, world)
            sizes = [masters(state)[index].numel() for state in optim]
            if any(size != layout.partition_numel for size in sizes):
                raise CheckpointError(
                    f"{files.folder}: group {index} should take {layout.partition_numel} elements on each of {world} ranks, "
                    f"the files hold {sizes}. The model file and the optimizer files are of different saves."
                )
        else:
            paddings = (optim[0].get("param_alignment_paddings") or [None] * len(shapes))[index]
            # The last partition is stored without padding, the first one never is, unless it is the last.
            layout = whole_group(group, paddings, max(1, masters(optim[0])[index].numel()), world)
            # Under round_robin_gradients DeepSpeed notes the places of the order before it was changed; the model file has
            # the order of the flat tensors.
            noted = [] if _is_round_robin(first) else [state.get("param_slice_mappings") for state in optim]
            _check_places(files, layout, noted, index)
        layouts.append(layout)
    return layouts


def _is_round_robin(first: Mapping[str, Any]) -> bool:
    section = (first.get("ds_config") or {}).get("zero_optimization")
    return isinstance(section, Mapping) and bool(section.get("round_robin_gradients"))


def _check_places(files: DeepSpeedFiles, layout: GroupLayout, noted: list[Any], index: int) -> None:
    """Our places of parameters against those that DeepSpeed noted."""
    computed: dict[tuple[int, str], tuple[int, int]] = {}
    for name in layout.slots:
        for piece in layout.pieces(name):
            if piece.rank >= layout.world:
                raise CheckpointError(
                    f"{files.folder}: the parameters of group {index} do not fit the {layout.world} partitions of "
                    f"{layout.partition_numel} elements in the optimizer files. The files are of different saves."
                )
            computed[piece.rank, name] = (piece.in_flat, piece.numel)
    for rank, mappings in enumerate(noted):
        for name, place in (mappings[index] if mappings else {}).items():
            if computed.get((rank, name)) != (place.start, place.numel):
                raise CheckpointError(
                    f"{files.optim[rank]}: DeepSpeed noted {name!r} at element {place.start} ({place.numel} elements), but "
                    f"after the model file it is at {computed.get((rank, name))}. The files are of different saves."
                )
