"""A file system that fails, or takes the process with it, at one step of a save."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardledger.checkpoint.files import Files

DIED = 9
"""Exit code of a process that was ended here: nothing is cleaned up, as by kill -9."""


class FaultyFiles(Files):
    """Names every step below `root` ("write .two.saving/manifest.json") in `steps`; at the step `fail_at` it calls `fault`.

    `moment`: "before" the step, "after" it, or "torn", which leaves half of the file that the step writes.
    """

    def __init__(
        self, root: str, fail_at: str = "", moment: str = "before", fault: Callable[[], Any] | None = None
    ) -> None:
        self.root = Path(root)
        self.steps: list[str] = []
        self.fail_at = fail_at
        self.moment = moment
        self.fault = fault or (lambda: os._exit(DIED))
        self._lock = threading.Lock()

    def _at(self, what: str, path: Path, action: Callable[[], Any]) -> Any:
        step = f"{what} {path.relative_to(self.root)}"
        with self._lock:
            self.steps.append(step)
        if step != self.fail_at:
            return action()
        if self.moment == "before":
            self.fault()
        result = action()
        if self.moment == "torn" and path.is_file():
            os.truncate(path, path.stat().st_size // 2)
        self.fault()
        return result

    def make_folder(self, path):
        self._at("make", path, lambda: super(FaultyFiles, self).make_folder(path))

    def write(self, path, content):
        self._at("write", path, lambda: super(FaultyFiles, self).write(path, content))

    def write_parts(self, path, tensors):
        self._at("tensors", path, lambda: super(FaultyFiles, self).write_parts(path, tensors))

    def settle(self, path):
        return self._at("settle", path, lambda: super(FaultyFiles, self).settle(path))

    def sync_folder(self, path):
        self._at("sync", path, lambda: super(FaultyFiles, self).sync_folder(path))

    def rename(self, old, new):
        self._at("rename", old, lambda: super(FaultyFiles, self).rename(old, new))

    def remove(self, path):
        self._at("remove", path, lambda: super(FaultyFiles, self).remove(path))
