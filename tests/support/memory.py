"""Counts live tensor bytes in two independent ways; neither asks the engine."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def live_bytes(collect: bool = True) -> int:
    """Bytes of all storages that a Python tensor refers to. What only autograd's graph holds is not seen."""
    if collect:
        gc.collect()
    found = {}
    # A released parameter refuses to be read; its placeholder's bytes count all the same.
    with torch._C.DisableTorchFunctionSubclass():
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor) and not item.is_meta:
                storage = item.untyped_storage()
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


class StorageMeter(TorchDispatchMode):
    """Remembers every storage an operator touches while it is on; `bytes()` adds up those still alive.

    Sees what autograd holds as well. A storage resized to nothing counts as nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                    reference = StorageWeakRef(tensor.untyped_storage())
                    self._seen[reference.cdata] = reference
        return result

    def bytes(self) -> int:
        """Bytes of the storages that are alive now."""
        gc.collect()
        self._seen = {key: reference for key, reference in self._seen.items() if not reference.expired()}
        # Only of those not expired may the pointer be opened.
        return sum(torch.UntypedStorage._new_with_weak_ptr(key).nbytes() for key in self._seen)


class PeakMeter(StorageMeter):
    """Remembers in `peak` the most bytes that were alive after any operator; set it to 0 to start anew."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._seen = {key: reference for key, reference in self._seen.items() if not reference.expired()}
        self.peak = max(self.peak, sum(torch.UntypedStorage._new_with_weak_ptr(key).nbytes() for key in self._seen))
        return result
