"""How NodeActors read from each other: a protocol, and its implementation through Ray object refs.

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
from raykv.protocol.columns import Source, SourceKind
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

    def start_read(self, source: Source, request: ReadRequest) -> PendingRead:
        """Begin a read; the transfer runs while the caller does something else.

        Raises:
            PeerError: there is no such node.
        """


class ObjectRefTransport:
    """Reads by calling the named actors, whose handles are kept until a call fails."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def start_read(self, source: Source, request: ReadRequest) -> PendingRead:
        try:
            ref = self._handle(source).read.remote(encode(request))
        except Exception as error:
            self._forget(source)
            raise PeerError(f"node {source.node_id}: {what_failed(error)}") from error
        return _PendingRef(self, source, ref)

    def _handle(self, source: Source) -> Any:
        name = names.source_actor(source)
        with self._lock:
            handle = self._handles.get(name)
        if handle is None:
            handle = within(GCS_S, lambda: ray.get_actor(name, namespace=names.RAY_NAMESPACE))
            # An import comes once.
            if source.kind is not SourceKind.IMPORT:
                with self._lock:
                    self._handles[name] = handle
        return handle

    def _forget(self, source: Source) -> None:
        with self._lock:
            self._handles.pop(names.source_actor(source), None)


class _PendingRef:
    def __init__(self, transport: ObjectRefTransport, source: Source, ref: Any) -> None:
        self._transport = transport
        self._source = source
        self._ref = ref

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        try:
            raw, data = ray.get(self._ref, timeout=max(0.0, timeout_s))
            return receive(raw, ReadReply, "the source", "the NodeActor"), data
        except Exception as error:
            self._transport._forget(self._source)
            raise PeerError(f"node {self._source.node_id}: {what_failed(error)}") from error


def what_failed(error: BaseException) -> str:
    """The kind of an error; of a refusal in another actor, also what it says."""
    cause = cause_of(error)
    if isinstance(cause, RayKVError):
        return f"{type(cause).__name__}: {cause}"
    return type(cause).__name__
