"""How NodeActors read from each other: a protocol, and the way through Ray object refs.

A read is a call of the source's method `read`, whose return value travels through the object stores
of both nodes: Ray moves the bytes, and frees them when the reference goes.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import ray

from raykv.base.deadlines import GCS_S
from raykv.base.errors import RayKVError, cause_of
from raykv.base.threads import within
from raykv.cluster import names
from raykv.protocol.framing import encode, receive
from raykv.protocol.peer import ReadReply, ReadRequest

Bytes = npt.NDArray[np.uint8]


class PeerError(RayKVError):
    """Another node did not answer, or not in time."""


class PendingRead(Protocol):
    """A read that is under way."""

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        """The source's answer, and the bytes of all chunks that were not refused.

        Raises:
            PeerError: there was no answer.
        """


class PeerTransport(Protocol):
    """Reads chunks out of other nodes' pools."""

    def start_read(self, node_id: str, request: ReadRequest) -> PendingRead:
        """Begin a read; the transfer runs while the caller does something else.

        Raises:
            PeerError: there is no such node.
        """


class ObjectRefTransport:
    """Through the named actors; their handles are kept until one fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def start_read(self, node_id: str, request: ReadRequest) -> PendingRead:
        try:
            ref = self._handle(node_id).read.remote(encode(request))
        except Exception as error:
            self._forget(node_id)
            raise PeerError(f"node {node_id}: {what_failed(error)}") from error
        return _PendingRef(self, node_id, ref)

    def _handle(self, node_id: str) -> Any:
        with self._lock:
            handle = self._handles.get(node_id)
        if handle is None:
            name = names.node_actor(node_id)
            handle = within(GCS_S, lambda: ray.get_actor(name, namespace=names.RAY_NAMESPACE))
            # An import comes once.
            if not node_id.startswith(names.IMPORT_PREFIX):
                with self._lock:
                    self._handles[node_id] = handle
        return handle

    def _forget(self, node_id: str) -> None:
        with self._lock:
            self._handles.pop(node_id, None)


class _PendingRef:
    def __init__(self, transport: ObjectRefTransport, node_id: str, ref: Any) -> None:
        self._transport = transport
        self._node_id = node_id
        self._ref = ref

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        try:
            raw, data = ray.get(self._ref, timeout=max(0.0, timeout_s))
            return receive(raw, ReadReply, "the source", "the NodeActor"), data
        except Exception as error:
            self._transport._forget(self._node_id)
            raise PeerError(f"node {self._node_id}: {what_failed(error)}") from error


def what_failed(error: BaseException) -> str:
    """The kind of an error; of a refusal in another actor, also what it says."""
    cause = cause_of(error)
    if isinstance(cause, RayKVError):
        return f"{type(cause).__name__}: {cause}"
    return type(cause).__name__
