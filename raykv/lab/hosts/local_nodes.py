"""Further Ray nodes on this host, to try on one machine what is meant for several."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError
from raykv.cluster.ask import end_node_actor
from raykv.cluster.join import (
    AUTH_MODE,
    RAY_START_S,
    TOKEN,
    begin_ray_start,
    join,
    joined_by_others,
    withdraw,
)
from raykv.cluster.processes import stop_group

OBJECT_STORE_BYTES = 512 << 20
"""Enough for the pieces of fetches that are under way."""


@dataclass(frozen=True)
class LocalNode:
    """A raylet that `add_local_node` started."""

    node_id: str
    process_group: int

    def stop(self) -> None:
        """End the node with all that runs on it."""
        stop_group(self.process_group)


def add_local_node(
    address: str,
    object_store_bytes: int = OBJECT_STORE_BYTES,
    resources: Mapping[str, float] | None = None,
) -> LocalNode:
    """Start one more Ray node on this host, in a process group of its own; joins the cluster.

    `resources` are custom ones, in addition to this host's.

    Raises:
        ClusterError: it did not start.
    """
    join(address)
    before = _alive()
    arguments = [
        f"--address={address}",
        f"--object-store-memory={object_store_bytes}",
        f"--resources={json.dumps(dict(resources or {}))}",
    ]
    mode = {AUTH_MODE: os.environ.get(AUTH_MODE, TOKEN)}
    others = joined_by_others()
    with tempfile.TemporaryFile("w+") as output:
        starter = begin_ray_start(arguments, mode, output)
        give_up_at = time.monotonic() + RAY_START_S
        while time.monotonic() < give_up_at and starter.poll() in (None, 0):
            new = _alive() - before
            if new and starter.poll() == 0:
                withdraw(address, others)
                return LocalNode(new.pop(), starter.pid)
            time.sleep(deadlines.LOOK_S)
        stop_group(starter.pid)
        output.seek(0)
        raise ClusterError(f"no further Ray node started: {output.read().strip()[-2000:]}")


@contextmanager
def local_node(address: str, **options: Any) -> Iterator[str]:
    """Start a node as `add_local_node` does, and return its id; it ends with the context."""
    node = add_local_node(address, **options)
    with ExitStack() as stack:
        stack.callback(node.stop)
        stack.callback(end_node_actor, node.node_id)
        yield node.node_id


def _alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
