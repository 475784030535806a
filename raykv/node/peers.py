"""How NodeActors read from each other: the protocols, and their implementation through Ray.

A read is a call of the source's method `read`, whose return value travels through the object stores
of both nodes: Ray moves the bytes, and frees them when the reference goes. `nixl` has the other
way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import ray

from raykv.base import deadlines
from raykv.base.errors import RayKVError, cause_of
from raykv.base.threads import within
from raykv.cluster import names
from raykv.protocol import columns, copies, framing

Bytes = npt.NDArray[np.uint8]


class PeerError(RayKVError):
    """Another node did not answer, or not in time."""


class PendingRead(Protocol):
    """A read that is under way."""

    def wait(self, timeout_s: float) -> tuple[copies.ReadReply, Bytes]:
        """The source's answer, and the bytes of all chunks that were not refused.

        Raises:
            PeerError: there was no answer.
        """

    def abandon(self) -> None:
        """Give the read up; its answer is dropped."""


class PeerTransport(Protocol):
    """Reads chunks out of other nodes' pools."""

    def start_read(self, source: columns.Source, request: copies.Read) -> PendingRead:
        """Begin a read; the transfer runs while the caller does something else.

        Raises:
            PeerError: there is no such node.
        """


class Call(Protocol):
    """A question to another NodeActor that is under way."""

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once.

        Raises:
            PeerError: that can't be said.
        """

    def wait(self, timeout_s: float) -> Any:
        """The answer.

        Raises:
            PeerError: there is none.
        """

    def again(self, method: str, *arguments: Any) -> Call:
        """Ask the same actor another question at once, without a lookup.

        Raises:
            PeerError: it can't be asked.
        """


class Peers(Protocol):
    """The other NodeActors."""

    def call(self, source: columns.Source, method: str, *arguments: Any) -> Call:
        """Call a method of one of them.

        Raises:
            PeerError: there is no such node.
        """


class RayPeers:
    """Calls the named actors, whose handles are kept until a call fails. It is a transport, too:
    of reads whose bytes come as return values.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handles: dict[str, Any] = {}

    def call(self, source: columns.Source, method: str, *arguments: Any) -> RayCall:
        with self.failing(source):
            return RayCall(self, source, self._handle(source), method, arguments)

    def start_read(self, source: columns.Source, request: copies.Read) -> PendingRead:
        return _PendingCall(source, self.call(source, "read", framing.encode(request)))

    @contextmanager
    def failing(self, source: columns.Source) -> Iterator[None]:
        """Whatever fails is a `PeerError`, and the source's handle is looked up anew next time."""
        try:
            yield
        except Exception as error:
            with self._lock:
                self._handles.pop(names.source_actor(source), None)
            raise PeerError(f"node {source.node_id}: {what_failed(error)}") from error

    def _handle(self, source: columns.Source) -> Any:
        name = names.source_actor(source)
        with self._lock:
            handle = self._handles.get(name)
        if handle is None:
            found = partial(ray.get_actor, name, namespace=names.RAY_NAMESPACE)
            handle = within(deadlines.ANSWER_S, found)
            # An import comes once.
            if source.kind is not columns.SourceKind.IMPORT:
                with self._lock:
                    self._handles[name] = handle
        return handle


class RayCall:
    """A call of `RayPeers`."""

    def __init__(
        self, peers: RayPeers, source: columns.Source, actor: Any, method: str, arguments: Any
    ) -> None:
        self._peers = peers
        self._source = source
        self._actor = actor
        self._ref = getattr(actor, method).remote(*arguments)

    def is_done(self) -> bool:
        with self._peers.failing(self._source):
            done, _ = ray.wait([self._ref], timeout=0, fetch_local=False)
        return bool(done)

    def wait(self, timeout_s: float) -> Any:
        with self._peers.failing(self._source):
            return ray.get(self._ref, timeout=max(0.0, timeout_s))

    def again(self, method: str, *arguments: Any) -> RayCall:
        with self._peers.failing(self._source):
            return RayCall(self._peers, self._source, self._actor, method, arguments)


class _PendingCall:
    def __init__(self, source: columns.Source, call: Call) -> None:
        self._source = source
        self._call = call

    def wait(self, timeout_s: float) -> tuple[copies.ReadReply, Bytes]:
        answer = self._call.wait(timeout_s)
        try:
            raw, data = answer
        except (TypeError, ValueError) as error:
            raise PeerError(f"node {self._source.node_id}: {what_failed(error)}") from error
        return received(self._source, raw, copies.ReadReply), data

    def abandon(self) -> None:
        """Ray frees what comes."""


def received(source: columns.Source, raw: Any, kind: type[framing.S]) -> framing.S:
    """A source's answer.

    Raises:
        PeerError: it is no such answer.
    """
    try:
        return framing.receive(raw, kind, "the source", "the NodeActor")
    except RayKVError as error:
        raise PeerError(f"node {source.node_id}: {what_failed(error)}") from error


def what_failed(error: BaseException) -> str:
    """The kind of an error; of a refusal in another actor, also what it says."""
    cause = cause_of(error)
    if isinstance(cause, RayKVError):
        return f"{type(cause).__name__}: {cause}"
    return type(cause).__name__
