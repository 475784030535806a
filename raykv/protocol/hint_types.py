"""What requests wish for their chunks: a struct that crosses processes, as in `messages.py`."""

from __future__ import annotations

import msgspec


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What requests wish for their prompts' chunks: not to be evicted for so many seconds
    (`pinned`, `pin_s`), or to be evicted after those of lower priority (`favoured`, `priorities`).
    """

    pinned: list[bytes] = []
    pin_s: list[float] = []
    favoured: list[bytes] = []
    priorities: list[int] = []
