"""The categories that every byte of training memory falls into."""

from __future__ import annotations

CATEGORIES = (
    "params",
    "grads",
    "master",
    "optimizer",
    "activations",
    "communication",
    "temporary",
    "framework",
)
"""In the order in which they are shown; ``total`` is their sum."""

STATE_CATEGORIES = CATEGORIES[:4]
"""What the layout implies exactly."""
