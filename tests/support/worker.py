"""One rank of the pool in `support.ranks`: a process that keeps torch imported and runs the functions it is sent.

Started as `python worker.py FD`, where FD is an open duplex pipe. It ends when the pipe closes, when the process that
started it is gone, or when it is killed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parents[1]


def _exit_with_parent(parent: int) -> None:
    """Leave even when this process is stuck inside a collective: nobody is left to kill it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _load(name: str, file: str) -> ModuleType:
    """The module under the name pytest gave it, so that what it defines pickles in both directions."""
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == file:
        return known
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _call(task: dict[str, object]) -> object:
    import torch

    os.environ.update(task["environment"])  # type: ignore[arg-type]
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    module = _load(str(task["module"]), str(task["file"]))
    function = getattr(module, str(task["function"]))
    # What lives now is left out of every later look at the heap, which makes counting live tensors fast.
    gc.collect()
    gc.freeze()
    return function(*pickle.loads(task["arguments"]))  # type: ignore[arg-type]


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def serve(pipe: Connection) -> None:
    """Answer each task with `("ok", pickled result)` or `("error", traceback, time)`."""
    import torch

    torch.set_num_threads(1)
    pipe.send(("ready", os.getpid()))
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            # Pickled by hand: the pipe's pickler would pass tensors as shared memory that dies with this process.
            answer = ("ok", pickle.dumps(_call(task)))
        except BaseException:  # noqa: BLE001 - the test decides what it means
            answer = ("error", traceback.format_exc(), time.time())
        try:
            pipe.send(answer)
            # Only after the answer: when a peer is gone, leaving the group may itself fail.
            _leave_group()
            pipe.send(("left",))
        except OSError:
            return


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    threading.Thread(target=_exit_with_parent, args=(os.getppid(),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
