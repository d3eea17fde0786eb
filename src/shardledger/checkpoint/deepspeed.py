"""A DeepSpeed checkpoint of ZeRO stages 1, 2 or 3, read without DeepSpeed: whole tensors by parameter name.

    checkpoint = open_deepspeed(Path("ds_checkpoints"))
    checkpoint.master("embed.weight")          # fp32 master weights, whole
    checkpoint.state("embed.weight", "exp_avg")
    checkpoint.weight("embed.weight")          # as the model computes with it

The files stay mapped; one parameter is put together at a time. Flat tensors are laid out as ``deepspeed_layout`` says; for
stages 1 and 2 the places that DeepSpeed itself noted (``param_slice_mappings``) must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardledger.checkpoint.deepspeed_files import DeepSpeedFiles, find_files
from shardledger.checkpoint.deepspeed_layout import GroupLayout
from shardledger.checkpoint.deepspeed_pickle import check_records, load_restricted
from shardledger.checkpoint.deepspeed_save import (
    check_ranks,
    check_worlds,
    group_layouts,
    inner_state,
    masters,
    optimizer_dict,
    state_of,
)
from shardledger.errors import CheckpointError

#: DeepSpeed's own keys at the top of a model_states file; all others are the user's client state.
_OWN_KEYS = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps"),
        *("global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    }
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedParameter:
    """One parameter, under the name that DeepSpeed stores it by."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    """What the model computes with."""
    trainable: bool
    flat: int | None
    """Index of the flat tensor that holds its master weights; None when it is frozen."""


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFacts:
    """What a checkpoint says beside its tensors."""

    tag: str
    version: str
    stage: int
    world: int
    config: Mapping[str, Any]
    global_steps: int
    global_samples: int
    skipped_steps: int
    scheduler: Mapping[str, Any] | None
    loss_scaler: Mapping[str, Any]
    """Attributes of DeepSpeed's loss scaler; empty where losses are not scaled."""
    param_groups: tuple[Mapping[str, Any], ...]
    """As the optimizer stores them, ``names`` in place of ``params``."""
    client_state: Mapping[str, Any]
    unread: tuple[str, ...]
    """Entries of ``module`` that are neither parameters nor buffers, such as extra state."""


class DeepSpeedCheckpoint:
    """One opened checkpoint; make it with :func:`open_deepspeed`."""

    def __init__(self, files: DeepSpeedFiles, model: list[dict[str, Any]], optim: list[dict[str, Any]]) -> None:
        first = model[0]
        self._files = files
        self._model = model
        self._optim = optim
        self._layouts = group_layouts(files, first, optim)
        self.tied: dict[str, str] = {}
        for state in model:  # under stage 3 only rank 0 knows them
            self.tied.update(state.get("shared_params") or {})
        self.facts = _facts(files, first, optim, self._layouts)
        self.parameters = _parameters(files, model, self._layouts, self.tied)
        self._by_name = {p.name: p for p in self.parameters}
        self.buffers: dict[str, torch.Tensor] = {
            name: first["module"][name] for name in first["buffer_names"] if name in first["module"]
        }

    @property
    def folder(self) -> Path:
        """The folder of the tag."""
        return self._files.folder

    def parameter(self, name: str) -> DeepSpeedParameter:
        """The parameter of that name, or of the name it is tied to.

        Raises:
            CheckpointError: no such parameter.
        """
        found = self._by_name.get(self.tied.get(name, name))
        if found is None:
            raise CheckpointError(f"{self.folder} has no parameter {name!r}.")
        return found

    def master(self, name: str) -> torch.Tensor:
        """Master weights of a trained parameter, whole, in the dtype of the file (fp32, unless 16-bit masters were asked for).

        Raises:
            CheckpointError: no such parameter, or it is frozen and has none.
        """
        parameter = self.parameter(name)
        index = self._flat_of(parameter)
        return self._join(parameter, [masters(state)[index] for state in self._optim])

    def states(self, name: str) -> dict[str, torch.dtype | None]:
        """Optimizer states of a trained parameter: the dtype of those with one value per element, None for single values.

        Empty when the checkpoint was saved before the first step.
        """
        found = state_of(self._optim[0], self._flat_of(self.parameter(name)))
        return {key: value.dtype if _is_flat(value) else None for key, value in found.items()}

    def state(self, name: str, key: str) -> Any:
        """One optimizer state of a trained parameter: a whole tensor, or the single value as it is stored.

        Raises:
            CheckpointError: it is not stored on all ranks, or in another form.
        """
        parameter = self.parameter(name)
        index = self._flat_of(parameter)
        values = [state_of(optim, index).get(key) for optim in self._optim]
        if values[0] is not None and not _is_flat(values[0]):
            return values[0]
        if not all(_is_flat(value) for value in values):
            raise CheckpointError(f"{self.folder}: the optimizer state {key!r} is missing on some ranks.")
        return self._join(parameter, values, key)

    def weight(self, name: str) -> torch.Tensor:
        """The weights that the model computes with, whole, in its dtype."""
        parameter = self.parameter(name)
        stored = self._model[0]["module"].get(parameter.name)
        if stored is not None and tuple(stored.shape) == parameter.shape:
            return stored
        if parameter.flat is not None:
            return self.master(name).to(parameter.dtype)
        fragments = [(state.get("frozen_param_fragments") or {}).get(parameter.name) for state in self._model]
        if any(fragment is None for fragment in fragments):
            raise CheckpointError(
                f"{self.folder}: no file holds the values of the frozen parameter {parameter.name!r}."
            )
        whole = torch.cat([fragment.reshape(-1) for fragment in fragments])[: prod(parameter.shape)]
        if whole.numel() != prod(parameter.shape):
            raise CheckpointError(
                f"{self.folder}: the ranks hold {whole.numel()} elements of {parameter.name!r}, which has "
                f"{prod(parameter.shape)}."
            )
        return whole.view(parameter.shape)

    def _flat_of(self, parameter: DeepSpeedParameter) -> int:
        if parameter.flat is None:
            raise CheckpointError(f"{self.folder}: {parameter.name!r} is frozen, it has no master weights or states.")
        return parameter.flat

    def _join(
        self, parameter: DeepSpeedParameter, flats: list[torch.Tensor], key: str = "master weights"
    ) -> torch.Tensor:
        """One parameter from the flat tensors of all ranks."""
        assert parameter.flat is not None
        whole = torch.empty(prod(parameter.shape), dtype=flats[0].dtype)
        for piece in self._layouts[parameter.flat].pieces(parameter.name):
            flat = flats[piece.rank]
            if flat.dim() != 1 or piece.in_flat + piece.numel > flat.numel():
                raise CheckpointError(
                    f"{self.folder}: the {key} of rank {piece.rank} have shape {list(flat.shape)}, but {parameter.name!r} "
                    f"should lie at elements {piece.in_flat} to {piece.in_flat + piece.numel}. Is the file from another save?"
                )
            whole[piece.in_parameter : piece.in_parameter + piece.numel] = flat[
                piece.in_flat : piece.in_flat + piece.numel
            ]
        return whole.view(parameter.shape)


def _is_flat(value: Any) -> bool:
    """Whether an optimizer state has one value per element."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def open_deepspeed(
    path: Path, tag: str | None = None, *, inert: Iterable[str] = (), checksums: bool = False
) -> DeepSpeedCheckpoint:
    """Open a checkpoint that DeepSpeed 0.16 to 0.19 wrote at ZeRO stage 1, 2 or 3.

    Args:
        path: the folder ``save_checkpoint`` was called with, or the folder of one tag in it.
        tag: which checkpoint; None takes the one that ``latest`` names.
        inert: classes of the user's own in the client state, to be read as empty records.
        checksums: whether to read every file once and compare it with its checksums.

    Raises:
        CheckpointError: no such checkpoint; a file is missing, damaged, from another save, or names what is not allowed.
    """
    files = find_files(path, tag)
    if checksums:
        for file in (*files.model, *files.optim.values()):
            check_records(file)
    optim = {}
    for rank, file in files.optim.items():
        optim[rank] = optimizer_dict(file, load_restricted(file, inert))
    check_ranks(files, optim)
    model = []
    for file in files.model:
        state = load_restricted(file, inert)
        missing = [key for key in ("module", "buffer_names", "param_shapes") if state.get(key) is None]
        if missing:
            raise CheckpointError(
                f"{file} lacks {', '.join(missing)}: it is no model_states file of ZeRO stages 1 to 3."
            )
        model.append(state)
    check_worlds(files, model, len(optim))
    return DeepSpeedCheckpoint(files, model, [optim[rank] for rank in sorted(optim)])


def _facts(
    files: DeepSpeedFiles, first: Mapping[str, Any], optim: list[dict[str, Any]], layouts: list[GroupLayout]
) -> DeepSpeedFacts:
    config = first.get("ds_config") or {}
    three = "fp32_flat_groups" in optim[0]
    said = config.get("zero_optimization", {})
    stage = optim[0].get("zero_stage", said.get("stage", 1) if isinstance(said, Mapping) else 1)
    groups = []
    for position, group in enumerate(inner_state(optim[0])["param_groups"]):
        flats = group["params"] if three else [position]
        names = [name for flat in flats for name in layouts[flat].slots]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "names": names})
    known = {*first["param_shapes"][0]} if first["param_shapes"] else set()
    return DeepSpeedFacts(
        tag=files.tag,
        version=str(first.get("ds_version") or optim[0]["ds_version"]),
        stage=3 if three else int(stage),
        world=len(optim),
        config=config,
        global_steps=int(first.get("global_steps", 0)),
        global_samples=int(first.get("global_samples", 0)),
        skipped_steps=int(first.get("skipped_steps", 0)),
        scheduler=first.get("lr_scheduler"),
        loss_scaler=dict(getattr(optim[0].get("loss_scaler"), "__dict__", {})),
        param_groups=tuple(groups),
        client_state={key: value for key, value in first.items() if key not in _OWN_KEYS},
        unread=tuple(k for k, v in first["module"].items() if not isinstance(v, torch.Tensor) and k not in known),
    )


def _parameters(
    files: DeepSpeedFiles, model: list[dict[str, Any]], layouts: list[GroupLayout], tied: Mapping[str, str]
) -> tuple[DeepSpeedParameter, ...]:
    """All parameters in the model's own order, aliases left out."""
    first = model[0]
    trained = {name: (index, shape) for index, g in enumerate(first["param_shapes"]) for name, shape in g.items()}
    frozen = first.get("frozen_param_shapes") or {}
    buffers = set(first["buffer_names"])
    found = []
    for name, stored in first["module"].items():
        if name in buffers or name in tied or not isinstance(stored, torch.Tensor):
            continue
        index, shape = trained.get(name, (None, frozen.get(name, stored.shape)))
        if (
            name not in trained
            and name not in frozen
            and len(layouts)
            and layouts[0].per_parameter
            and not stored.numel()
        ):
            raise CheckpointError(
                f"{files.folder}: {name!r} is in the model but in no file: it was trained by no param group, and stage 3 saves "
                f"only what the optimizer holds. Give it to the optimizer, or freeze it, and save again."
            )
        found.append(
            DeepSpeedParameter(name=name, shape=tuple(shape), dtype=stored.dtype, trainable=name in trained, flat=index)
        )
    absent = sorted(set(trained) - {parameter.name for parameter in found})
    if absent:
        raise CheckpointError(
            f"{files.folder}: the optimizer holds {absent[0]!r}, which is not in 'module' of the model file."
        )
    return tuple(found)
