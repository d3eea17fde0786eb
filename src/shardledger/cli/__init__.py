"""The command line. Nothing here imports torch before a command needs it: ``--help`` answers at once."""

from __future__ import annotations

__all__: list[str] = []
