"""The scheduler actor's own thread: it has the store of Ray's head keep what is to outlive the
actor, and every node that an operator wished for get its NodeActor, also those that join later.

```
   the actor ── keep ──► pin's keys, then the document that names them ──► has_kept
```

The actor itself never waits for it. If it is not known whether the store has kept a document, this
process ends: the next life begins with what the store has.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import ray

from raykv.base import deadlines
from raykv.base.errors import ClusterError, first_line
from raykv.base.threads import OnFailure, end_process, start_thread, within
from raykv.cluster import ask, bequest, names
from raykv.directory.known.desk import Draft
from raykv.node import launch, wishes
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.operator import OrdersDocument, PoolWish

logger = logging.getLogger("raykv.scheduler")

# For what an earlier life has left: without it, what was cleared could come back. Longer than a
# busy head node takes; where it is gone, nobody could make the actor.
INHERIT_S = 60.0

# Between two searches for nodes that lack their NodeActor, first, and longest while Ray's head node
# does not answer: each search occupies a thread.
RECONCILE_PAUSES_S = (2.0, 60.0)


T = TypeVar("T")

ZERO = 1_735_689_600
"""2025-01-01 in Unix time: lives are numbered by the milliseconds since then."""


@dataclass
class Inheritance:
    """What earlier lives have left. `life` is that of this one."""

    life: int
    orders: OrdersDocument | None = None
    pin_keys: dict[bytes, bytes] = field(default_factory=dict)


def next_life(wall_time: float, last: int) -> int:
    """Above every earlier one, also where the clock has gone back or the store has lost it."""
    return max(int((wall_time - ZERO) * 1000), last + 1, 1)


class Steward:
    """See the module's docstring.

    Args:
        address: of the cluster.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._wish: PoolWish | None = None
        self._kept_wish: PoolWish | None = None
        self._draft: Draft | None = None
        self._unused: list[bytes] = []
        self._news = threading.Event()

    def start(self) -> Inheritance:
        """Begin.

        Raises:
            ClusterError: what earlier lives have left can't be had. Ray makes the actor anew.
        """
        left = _patiently(lambda: dict(bequest.entries()))
        last = left.pop(bequest.LIFE, b"")
        inherited = Inheritance(next_life(time.time(), int(last) if last.isdigit() else 0))
        _patiently(partial(bequest.put, bequest.LIFE, str(inherited.life).encode()))
        for name, value in left.items():
            try:
                self._inherit(name, value, inherited)
            except (msgspec.MsgspecError, ValueError) as error:
                logger.warning("the stored %s can't be read: %s", name, error)
        start_thread("raykv-steward", self._run, OnFailure.END_PROCESS)
        return inherited

    def _inherit(self, name: str, value: bytes, inherited: Inheritance) -> None:
        if name == bequest.WISH:
            wish = decode(value, PoolWish)
            if wish.version == PROTOCOL_VERSION:
                self._wish = self._kept_wish = wish
        elif name == bequest.ORDERS:
            inherited.orders = bequest.aged(value)
        elif name.startswith(bequest.PIN):
            inherited.pin_keys[bytes.fromhex(name.removeprefix(bequest.PIN))] = value

    # The actor's thread

    def keep(self, draft: Draft) -> None:
        """Have the store keep a document; the next one only when that `has_kept`."""
        assert self._draft is None, self._draft
        # Its own thread may just have taken it out, and puts the keys there again after that.
        with suppress(ValueError):
            self._unused.remove(draft.digest)
        self._draft = draft
        self._news.set()

    @property
    def has_kept(self) -> bool:
        """Whether the store has kept what it was given."""
        return self._draft is None

    def forget_pins(self, digests: Collection[bytes]) -> None:
        """No document names these any more."""
        self._unused += digests

    def set_wish(self, wish: PoolWish) -> None:
        """Have nodes that match it get a NodeActor from now on; it takes an earlier one's place."""
        self._wish = wish
        self._news.set()

    # Its own thread

    def _run(self) -> None:
        first_pause_s, longest_pause_s = RECONCILE_PAUSES_S
        has_complained, pause_s = False, first_pause_s
        look_at = 0.0
        while True:
            self._news.wait(max(0.0, look_at - time.monotonic()))
            self._news.clear()
            self._keep()
            if time.monotonic() < look_at and self._wish is self._kept_wish:
                continue
            try:
                self._keep_wish()
                self._forget()
                self._look()
            except Exception as error:
                if not has_complained:
                    has_complained = True
                    logger.warning(
                        "new nodes get no pool for now (said once): %s", first_line(error)
                    )
                look_at = time.monotonic() + pause_s
                pause_s = min(2 * pause_s, longest_pause_s)
            else:
                has_complained, pause_s = False, first_pause_s
                look_at = time.monotonic() + pause_s

    def _keep(self) -> None:
        draft = self._draft
        if draft is None:
            return
        try:
            if draft.keys:
                within(
                    deadlines.ANSWER_S, partial(bequest.put, _pin_name(draft.digest), draft.keys)
                )
            within(deadlines.ANSWER_S, partial(bequest.put_orders, draft.document))
        except Exception as error:
            # The store may keep it later, in place of the next document.
            end_process(f"it is not known whether orders were kept: {first_line(error)}")
        self._draft = None

    def _keep_wish(self) -> None:
        wish = self._wish
        if wish is not None and wish is not self._kept_wish:
            within(deadlines.ANSWER_S, partial(bequest.put, bequest.WISH, encode(wish)))
            self._kept_wish = wish

    def _forget(self) -> None:
        while self._unused:
            within(deadlines.ANSWER_S, partial(bequest.delete, _pin_name(self._unused.pop())))

    def _look(self) -> None:
        """Make the NodeActors that are missing."""
        wish = self._wish
        if wish is None:
            return
        there = set(within(deadlines.ANSWER_S, ask.named_actors))
        for node in within(deadlines.ANSWER_S, ray.nodes):
            facts = launch.facts_of(node)
            is_there = names.node_actor(facts.node_id) in there
            if not node["Alive"] or not wishes.wants(wish, facts) or is_there:
                continue
            logger.info("node %s gets a NodeActor", facts.node_id[:12])
            try:
                launch.make_node_actor(self._address, facts.node_id, wish)
            except ClusterError as error:
                logger.warning("%s", error)


def _pin_name(digest: bytes) -> str:
    return bequest.PIN + digest.hex()


def _patiently(call: Callable[[], T]) -> T:
    """What the store says; asks again where the head node is slow.

    Raises:
        ClusterError: it does not answer.
    """
    give_up_at = time.monotonic() + INHERIT_S
    while True:
        try:
            return within(deadlines.ANSWER_S, call)
        except Exception as error:
            what = f"what an earlier life has left can't be read: {first_line(error)}"
            if time.monotonic() > give_up_at:
                raise ClusterError(what) from error
            logger.warning("%s", what)
        time.sleep(RECONCILE_PAUSES_S[0])
