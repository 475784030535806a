"""When memory that a killed process could write to may be reused.

    killed ──► WAIT ── it has exited, or it has halted and no device wrote for it ──► SAFE
                 └──── neither is known for too long ───────────────────────────────► HOPELESS

Invariants:
    1. SAFE only if nothing can write on behalf of the process any more.
    2. Never WAIT after `last_s`: what waits for the memory gets an answer.

A process that was sent SIGKILL exits late when it gets no core, when it has much memory to give
back, or when its driver or file system hangs. It has *halted* before that: none of its threads runs
its own code any more. That is enough for memory which only its own code writes to. What a GPU was
ordered to copy for it may still be copied until the driver has taken its context down, which is a
part of its exit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Aftermath(Enum):
    """What is known of a killed process's writes."""

    WAIT = auto()
    SAFE = auto()
    HOPELESS = auto()


@dataclass(frozen=True)
class Killed:
    """What is seen of a process, `since_s` after SIGKILL was sent to it.

    `by_device`: a device may have been ordered to write into the memory.
    """

    since_s: float
    has_exited: bool
    has_halted: bool
    by_device: bool


def aftermath(seen: Killed, exit_s: float, last_s: float) -> Aftermath:
    """Whether the memory is safe, may become so, or will not be safe in time.

    Args:
        seen: of the process.
        exit_s: from the kill on, how long the exit, which proves everything, is waited for before
            less is asked for.
        last_s: how long any proof is.
    """
    if seen.has_exited:
        return Aftermath.SAFE
    if seen.since_s < exit_s:
        return Aftermath.WAIT
    if seen.has_halted and not seen.by_device:
        return Aftermath.SAFE
    return Aftermath.WAIT if seen.since_s < last_s else Aftermath.HOPELESS
