"""Notices what the user did to the module behind the engine's back, before it trains on something else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardledger.errors import EngineStateError
from shardledger.runtime.describe import owners
from shardledger.runtime.offload import Offload
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.unit import Unit


class Watch:
    """Compares the module's parameters with the engine's."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], offload: Offload | None = None) -> None:
        self._model = model
        self._offload = offload
        self._flats = [flat for unit in units for flat in unit.flats]
        self._places = owners(model)
        self._known = {id(parameter) for flat in self._flats for parameter in flat.parameters}
        self._frozen = [flat for flat in self._flats if not flat.layout.trainable]
        self._resident = [p for flat in self._flats if not flat.layout.param_sharded for p in flat.parameters]
        self._trained = [p for p in self._resident if p.requires_grad]
        self._versions: list[int] = []
        """Of the resident parameters."""
        self._tree: list[tuple[nn.Module, list[int], list[int]]] = []
        """Modules with the ids of their parameters and children, as they were when the last check found nothing."""
        self._pointers: list[int] = []
        """Memory of the resident parameters at that time."""
        self.note_update()

    def note_update(self) -> None:
        """The engine itself has changed the weights: graphs built before are out of date, later edits are the user's."""
        torch.autograd.graph.increment_version(self._trained)
        self._versions = [parameter._version for parameter in self._resident]

    @torch.no_grad()
    def check(self, *, thorough: bool = False) -> None:
        """Take over edits of 16-bit weights into their masters, and refuse what cannot be taken over.

        Edits count up a parameter's version; those through ``.data`` do not, and are found by comparing values
        (``thorough``).

        Raises:
            EngineStateError: a parameter was added, replaced or given other memory, or a frozen one was unfrozen.
        """
        if not thorough and self._is_as_it_was():
            for flat in self._frozen:
                self._check_frozen(flat)
            return
        versions = {id(parameter): version for parameter, version in zip(self._resident, self._versions, strict=True)}
        for flat in self._flats:
            resident = not flat.layout.param_sharded
            for parameter, slot, view in zip(flat.parameters, flat.layout.slots, flat.views, strict=True):
                if any(module._parameters.get(name) is not parameter for module, name in self._places[slot.name]):
                    raise _changed(slot.name, "was replaced by another one")
                if not resident:
                    continue
                if slot.numel and parameter.data_ptr() != view.data_ptr():
                    raise _changed(slot.name, "was given other memory (p.data = ..., model.half(), assign=True)")
                if parameter._version != versions[id(parameter)]:
                    self._take_over(flat, slot.name)
            if thorough:
                for name in flat.edited_masters():
                    self._take_over(flat, name)
            self._check_frozen(flat)
        for name, parameter in self._model.named_parameters():
            if id(parameter) not in self._known:
                raise _changed(name, "was added")
            if "_orig_mod." in name:
                raise EngineStateError(
                    f"parameter {name!r} was put behind a wrapper of torch.compile's after shardledger.initialize, so it would "
                    f"be saved under another name. Wrap modules before initialize, or call engine.compile() or "
                    f"module.compile(), which compile in place."
                )
        self._remember()

    def _is_as_it_was(self) -> bool:
        """Whether nothing has happened since the last check, in a fraction of its time: no names, no walk over the model."""
        for module, parameters, children in self._tree:
            if list(map(id, module._parameters.values())) != parameters:
                return False
            if list(map(id, module._modules.values())) != children:
                return False
        return (
            bool(self._tree)
            and [parameter._version for parameter in self._resident] == self._versions
            and [parameter.data_ptr() for parameter in self._resident] == self._pointers
        )

    def _remember(self) -> None:
        self._versions = [parameter._version for parameter in self._resident]
        self._pointers = [parameter.data_ptr() for parameter in self._resident]
        self._tree = [
            (module, list(map(id, module._parameters.values())), list(map(id, module._modules.values())))
            for module in self._model.modules()
        ]

    def _take_over(self, flat: FlatParameters, name: str) -> None:
        if self._offload is None:
            flat.take_over(name)
        else:  # masters may rest on disk
            with self._offload.opened([flat], None, write=True):
                flat.take_over(name)

    def _check_frozen(self, flat: FlatParameters) -> None:
        if flat.layout.trainable:
            return
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next(
                (s.name for s, p in zip(flat.layout.slots, flat.parameters, strict=True) if p.requires_grad), None
            )
        if thawed is not None:
            raise EngineStateError(
                f"parameter {thawed!r} was frozen at initialize and has been unfrozen since. The engine has no gradient "
                f"or optimizer state for it and would not train it: set requires_grad before shardledger.initialize, "
                f"or destroy the engine and initialize again."
            )


def _changed(name: str, what: str) -> EngineStateError:
    return EngineStateError(
        f"parameter {name!r} {what} after shardledger.initialize, so the engine would train something else. Change the "
        f"model before initialize; load weights with engine.load_state_dict; edit them inside "
        f"shardledger.GatheredParameters."
    )
