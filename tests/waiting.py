"""Waiting for something that another process does; always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster

QUIET_S = 0.4
"""On a busy machine a NodeActor that copies says nothing for a tenth of a second."""


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll `condition` until it holds.

    Raises:
        AssertionError: it did not hold within `deadline_s`; the text says what was waited for.
    """
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)


def wait_until_quiet(value: Callable[[], object], deadline_s: float, what: str) -> None:
    """Poll `value` until it has stayed the same for `QUIET_S`.

    Raises:
        AssertionError: it still changed after `deadline_s`.
    """
    last, since = value(), time.monotonic()

    def is_quiet() -> bool:
        nonlocal last, since
        now = value()
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since >= QUIET_S

    wait_until(is_quiet, deadline_s, what)


def wait_for_chunks(cluster: Cluster, number: int) -> None:
    """Until the directory knows so many chunks; several nodes may have the same one."""
    wait_until(
        lambda: sum(node.chunks for node in cluster.status().nodes) >= number,
        20.0,
        f"{number} chunks are stored",
    )
