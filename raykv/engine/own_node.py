"""The Ray node of an EngineCore, and its connection to Ray.

                           its raylet is gone
           HERE ──────────────────────────────────────► GONE: no cache
            ▲      another one has begun on this host     │
            └─────────────────────────────────────────────┘
              at that node; by a new connection, if the raylet of the old one is gone

Whether a raylet is gone is read from this host's processes. Ray is not asked: if another cluster
has begun at its address since, Ray's list of nodes ends the process that asks for it.

A process has one connection to Ray, and calls of Ray without one raise. So the connection is given
up and made anew while no other thread calls. Callers do not wait for each other.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from raykv.base.errors import ClusterError
from raykv.cluster import join as cluster
from raykv.cluster.join import Raylet, leave_ray

logger = logging.getLogger("raykv")


class RayHere:
    """What is asked of Ray and of this host; tests play another one."""

    def raylets(self) -> list[Raylet]:
        return cluster.raylets()

    def driver_node(self) -> str:
        """The node of the raylet that this process is connected to; empty: it is not."""
        return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""

    def rejoin(self, address: str) -> None:
        cluster.rejoin(address)


class SharedConnection:
    """Who uses the connection: any number of callers, or alone who makes it anew."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_callers = 0
        self._is_taken = False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Use the connection; wait while it is made anew."""
        with self._changed:
            # bounded: who is alone has deadlines of Ray's
            self._changed.wait_for(lambda: not self._is_taken)
            self._num_callers += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_callers -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, deadline_s: float | None = None) -> Iterator[None]:
        """Make it anew, or end it: new callers wait.

        Raises:
            TimeoutError: others have used it for that long.
        """
        with self._changed:
            # bounded: callers have deadlines of Ray's, or the caller's own
            if not self._changed.wait_for(lambda: not self._is_taken, deadline_s):
                raise TimeoutError
            self._is_taken = True
            try:
                if not self._changed.wait_for(lambda: not self._num_callers, deadline_s):
                    raise TimeoutError
            except TimeoutError:
                self._is_taken = False
                self._changed.notify_all()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._is_taken = False
                self._changed.notify_all()


class OwnNode:
    """See the module's docstring.

    Args:
        address: at which this process has joined its cluster.
        node_id: of a raylet of this host.
        is_ours: whether the connection is the engine's own, so that it may be made anew.
        here: Ray, as this process sees it.
    """

    def __init__(
        self, address: str, node_id: str, *, is_ours: bool, here: RayHere | None = None
    ) -> None:
        self._address = address
        self._is_ours = is_ours
        self._here = here or RayHere()
        self.node_id = node_id
        self.is_gone = False
        there = self._here.raylets()
        # None: they can't be seen from here, and count as there.
        self._driver = _find(there, self._here.driver_node())
        self._node = _find(there, node_id)
        self._connection = SharedConnection()
        self._has_left = False
        # The actors that are called, by what finds them.
        self._actors: dict[Callable[[], Any], Any] = {}

    def follow(self) -> bool:
        """Be at the next Ray node of this host if the last one is gone; False: there is none.

        Takes as long as joining a cluster does: never on a thread of vLLM's. One thread calls it,
        and keeps no handle of Ray's meanwhile.

        Raises:
            ClusterError: the connection could not be made anew; the next call tries again.
        """
        self.is_gone = not (self._connect() and self._move())
        return not self.is_gone

    def _connect(self) -> bool:
        """Whether this process is connected to a raylet of this host."""
        driver = self._driver
        there = self._here.raylets()
        if driver is None or (_find(there, driver.node_id) and self._here.driver_node()):
            return True
        if not self._is_ours:
            self._say(
                "the Ray node that this process is connected to is gone, and the connection is not "
                "the engine's own: start this process again, or the engine has no cache"
            )
            return False
        if not any(each.address == driver.address for each in there):
            self._say_gone(driver)
            return False
        with self._connection.alone():
            self._refuse_after_end()
            # Handles of an earlier connection must not be used.
            self._actors.clear()
            self._here.rejoin(self._address)
            self._driver = _find(self._here.raylets(), self._here.driver_node()) or driver
        return True

    def _move(self) -> bool:
        """Whether there is a node for the engine; it may be another one."""
        node = self._node
        there = self._here.raylets()
        if node is None or _find(there, node.node_id):
            return True
        following = cluster.successor(node, there)
        if following is None:
            self._say_gone(node)
            return False
        self._node, self.node_id = following, following.node_id
        logger.warning(
            "this engine is at the next Ray node of its host, %s, since %s is gone",
            following.node_id[:12],
            node.node_id[:12],
        )
        return True

    def _say_gone(self, raylet: Raylet) -> None:
        self._say(
            f"the Ray node {raylet.node_id[:12]} of this engine is gone, and with it the cache: "
            f"start Ray on this host again (`ray start --address={self._address}`), and the engine "
            "goes on there by itself"
        )

    def _say(self, sentence: str) -> None:
        """Log a sentence once, until the engine has a node again."""
        if not self.is_gone:
            logger.warning("%s", sentence)

    def has_on_host(self, node_id: str) -> bool:
        """Whether a node's raylet runs on this host, as far as that can be seen."""
        return node_id == self.node_id or _find(self._here.raylets(), node_id) is not None

    # The connection

    def call(
        self, find: Callable[[], Any], deadline_s: float, method: str, *arguments: bytes | str | int
    ) -> bytes:
        """The answer of a method of the actor that `find` finds, always the same one. After a
        failure it is looked for again.

        Raises:
            Exception: there is no answer in time.
            ClusterError: there is no connection.
        """
        try:
            with self._connection.shared():
                self._refuse_after_end()
                if not self._here.driver_node():
                    raise ClusterError("this engine is not connected to Ray")
                actor = self._actors.get(find)
                if actor is None:
                    actor = self._actors[find] = find()
                future = getattr(actor, method).remote(*arguments).future()
            answer: bytes = future.result(timeout=deadline_s)
        except Exception:
            self._actors.pop(find, None)
            raise
        return answer

    def _refuse_after_end(self) -> None:
        if self._has_left:
            raise ClusterError("the engine is shutting down")

    def leave(self, deadline_s: float) -> bool:
        """End the engine's own connection, for good, at most for `deadline_s` and as long again;
        False if it took longer. One that is not its own stays.
        """
        if not self._is_ours:
            return True
        try:
            with self._connection.alone(deadline_s):
                self._has_left = True
                return leave_ray(ray.shutdown, deadline_s)
        except TimeoutError:
            atexit.unregister(ray.shutdown)
            return False


def _find(there: Sequence[Raylet], node_id: str) -> Raylet | None:
    return next((each for each in there if each.node_id == node_id), None)
