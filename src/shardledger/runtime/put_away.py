"""States that the user sends away for a while (between training and generating, say) and brings back.

Storages are emptied in place, so that every view stays what it was; until they are back, the engine refuses every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from shardledger.errors import ConfigError, EngineStateError
from shardledger.runtime.assemble import Parts
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.released import is_away
from shardledger.transport.disk import SECTOR, AlignedBuffer, DiskFile, TierTraffic
from shardledger.transport.disk_folder import claim_folder, remove_folder, remove_with

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: moments, fp32 masters, weights, gradients; there is no gradient buffer apart from the gradients."""

_CHUNK = 16 << 20


@dataclass(frozen=True)
class _Saved:
    storage: torch.UntypedStorage
    nbytes: int
    values: torch.Tensor | None
    """Its bytes in host memory, 1-D uint8; None: on disk."""
    offset: int = 0


class PutAway:
    """What one call has sent away."""

    def __init__(self, parts: Parts, names: tuple[str, ...]) -> None:
        self.names = names
        self._parts = parts
        self._saved: list[_Saved] = []
        self._flats: list[FlatParameters] = []
        """Whose parameters are stand-ins meanwhile."""
        self._file: DiskFile | None = None
        self._folder: Path | None = None

    def send(self, path: str | None, *, pin: bool) -> None:
        """Send everything to host memory, or to a file below ``path``.

        Raises:
            ConfigError, DoesNotFitError: as for ``claim_folder``; nothing has been sent then.
        """
        storages = self._storages()
        if path is not None:
            total = sum(_sectors(s.nbytes()) for s in storages)
            self._folder = claim_folder(path, total, self._parts.transport, "offload_states: nvme_path")
            remove_with(self, self._folder)  # also when the program ends meanwhile
            self._file = DiskFile(self._folder / "states.bin", total, TierTraffic())
        offset = 0
        for storage in storages:
            size = storage.nbytes()
            source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            if self._file is None:
                values = torch.empty(size, dtype=torch.uint8, pin_memory=pin and storage.device.type == "cuda")
                values.copy_(source)
                self._saved.append(_Saved(storage, size, values))
            else:
                self._move(self._file, source, offset, write=True)
                self._saved.append(_Saved(storage, size, None, offset))
                offset += _sectors(size)
        full = {f.full.untyped_storage()._cdata: f for unit in self._parts.units for f in unit.flats}
        for saved in self._saved:
            flat = full.get(saved.storage._cdata)
            if flat is not None:
                flat.release()
                self._flats.append(flat)
            saved.storage.resize_(0)

    def bring_back(self) -> None:
        """Undo ``send``."""
        for saved in self._saved:
            self._restore(saved)
        for flat in self._flats:
            flat.expose()
        self.drop()

    def end(self) -> None:
        """The engine ends meanwhile: bring back weights that every rank has whole, which are the model's, and no more."""
        weights = {flat.full.untyped_storage()._cdata for flat in self._flats}
        try:
            for saved in self._saved:
                if saved.storage._cdata in weights:
                    self._restore(saved)
            for flat in self._flats:
                flat.expose()
        finally:
            self.drop()

    def _restore(self, saved: _Saved) -> None:
        saved.storage.resize_(saved.nbytes)
        target = torch.empty(0, dtype=torch.uint8, device=saved.storage.device).set_(saved.storage)  # type: ignore[call-overload]
        if saved.values is not None:
            target.copy_(saved.values)
        else:
            assert self._file is not None
            self._move(self._file, target, saved.offset, write=False)

    def drop(self) -> None:
        """Forget what was sent."""
        self._saved.clear()
        self._flats.clear()
        if self._file is not None:
            self._file.close()
        remove_folder(self._folder)
        self._file = self._folder = None

    def _storages(self) -> list[torch.UntypedStorage]:
        seen: dict[int, torch.UntypedStorage] = {}
        for tensor in self._tensors():
            storage = tensor.untyped_storage()
            if storage.nbytes():
                seen.setdefault(storage._cdata, storage)
        return list(seen.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        parts = self._parts
        device = next((flat.device.type for unit in parts.units for flat in unit.flats), "cpu")  # a root may have none
        weights = "lp_params" in self.names
        for unit in parts.units:
            for flat in unit.flats:
                if weights and not flat.layout.param_sharded:
                    yield flat.full
                for tensor, wanted in ((flat.shard, weights), (flat.master, "hp_params" in self.names)):
                    alone = tensor is not None and not flat.master_is_weights
                    if tensor is not None and tensor.device.type == device and (wanted and (weights or alone)):
                        yield tensor
            for gradients in unit.gradients if "lp_grads" in self.names else ():
                yield from (t for t in (gradients.local, gradients.held_sum) if t is not None)
        if "optim_states" in self.names and parts.stepper is not None:
            for state in parts.stepper.optimizer.state.values():
                held = [t for t in state.values() if isinstance(t, torch.Tensor) and not is_away(t)]
                yield from (t for t in held if t.device.type == device)

    def _move(self, file: DiskFile, tensor: torch.Tensor, offset: int, *, write: bool) -> None:
        buffer = AlignedBuffer(min(_CHUNK, tensor.numel()))
        for start in range(0, tensor.numel(), _CHUNK):
            part = tensor[start : start + _CHUNK]
            if write:
                buffer.tensor[: part.numel()].copy_(part)
                file.write(offset + start, buffer, 0, _sectors(part.numel())).wait()
            else:
                file.read(offset + start, buffer, 0, _sectors(part.numel())).wait()
                part.copy_(buffer.tensor[: part.numel()])


def _sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR) * SECTOR


def put_away(
    parts: Parts, include: Iterable[object] | None, device: object, *, pin: bool, nvme_path: str | None
) -> PutAway:
    """Send states to ``device`` (``"cpu"`` or ``"nvme"``); collective for the disk.

    Raises:
        ConfigError: an unknown state or device, or no folder for the disk.
        EngineStateError: a backward pass is unfinished, or parameters are gathered.
    """
    include = STATES if include is None else (include,) if isinstance(include, str) else include
    names = tuple(str(getattr(name, "value", name)) for name in include)
    unknown = [name for name in names if name not in STATES]
    if unknown:
        raise ConfigError(f"offload_states: there are no {unknown[0]!r}; include takes {', '.join(STATES)}.")
    home = str(getattr(device, "value", device))
    if home not in ("cpu", "nvme"):
        raise ConfigError(f'offload_states: device is {home!r}; it can be "cpu" (host memory) or "nvme" (disk).')
    if home == "nvme" and nvme_path is None:
        nvme_path = parts.plan.offload.optimizer_path or parts.plan.offload.params_path
        if nvme_path is None:
            raise ConfigError("offload_states to nvme needs nvme_path=<an existing folder on a fast local disk>.")
    if parts.schedule.in_backward or parts.executor.pinned:
        raise EngineStateError(
            "offload_states was called inside a backward pass or GatheredParameters: call it between steps."
        )
    parts.executor.settle_reductions()
    sent = PutAway(parts, names)
    try:
        sent.send(nvme_path if home == "nvme" else None, pin=pin)
    except BaseException:
        sent.drop()
        raise
    return sent
