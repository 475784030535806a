"""The scheduler actor's own thread: it remembers orders for the actor's next life, and has every
node that an operator wished for get its NodeActor, also those that join later.

The actor itself never waits for it. While Ray's head node does not answer nothing is lost: what is
to be written waits here, the latest value of each name.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import partial

import msgspec
import ray

from raykv.base.deadlines import GCS_S, INHERIT_S, RECONCILE_PAUSES_S
from raykv.base.errors import ClusterError, first_line
from raykv.base.threads import OnFailure, start_thread, within
from raykv.cluster import ask
from raykv.directory import bequest
from raykv.node.launch import facts_of, make_node_actor, name_of
from raykv.node.wishes import wants
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.operator import KeptLife, KeptPin, PinOrder, PoolWish, Quota

logger = logging.getLogger("raykv.scheduler")

PIN, WISH, QUOTA = "pin:", "wish", "quota:"


class Steward:
    """See the module's docstring.

    Args:
        address: of the cluster.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        # What is to be written; bounded by the numbers of pins and quotas that there may be.
        self._unwritten: dict[str, bytes | None] = {}
        self._wish: PoolWish | None = None
        # As the last life has left it, and as it is left now.
        self.life = KeptLife()
        # Those of the last life.
        self.quotas: list[Quota] = []
        self._news = threading.Event()
        self._first_pause_s, self._longest_pause_s = RECONCILE_PAUSES_S

    def start(self) -> list[PinOrder]:
        """Begin; returns the pins of the actor's last life, with the time that is left of each.

        `life` and `quotas` are what else it has left.

        Raises:
            ClusterError: what it has left can't be had. Ray makes the actor anew.
        """
        orders: list[PinOrder] = []
        for entry in _left():
            try:
                self._inherit(entry, orders)
            except msgspec.MsgspecError as error:
                logger.warning("what is left as %s can't be read: %s", entry.name, error)
        start_thread("raykv-steward", self._run, OnFailure.END_PROCESS)
        return orders

    def _inherit(self, entry: bequest.Entry, orders: list[PinOrder]) -> None:
        if entry.name == WISH:
            wish = decode(entry.value, PoolWish)
            self._wish = wish if wish.version == PROTOCOL_VERSION else None
        elif entry.name == bequest.LIFE:
            self.life = decode(entry.value, KeptLife)
        elif entry.name.startswith(QUOTA):
            quota = decode(entry.value, Quota)
            self.quotas.append(msgspec.structs.replace(quota, version=PROTOCOL_VERSION))
        elif entry.name.startswith(PIN):
            kept = decode(entry.value, KeptPin)
            left_s = kept.ends_at - time.time()
            if left_s > 0 and kept.order.version == PROTOCOL_VERSION:
                orders.append(msgspec.structs.replace(kept.order, ttl_s=left_s))
            else:
                self._write(entry.name, None)

    # The actor's thread

    def keep_pin(self, order: PinOrder) -> None:
        """Remember a pin."""
        self._write(PIN + order.pin_id, encode(KeptPin(order, time.time() + order.ttl_s)))

    def forget_pin(self, pin_id: str) -> None:
        """Forget a pin that has ended."""
        self._write(PIN + pin_id, None)

    def keep_quota(self, quota: Quota) -> None:
        """Remember a quota."""
        self._write(QUOTA + quota.name, encode(quota))

    def forget_quota(self, name: str) -> None:
        """Forget a quota that has ended."""
        self._write(QUOTA + name, None)

    def set_wish(self, wish: PoolWish) -> None:
        """Have nodes that match it get a NodeActor from now on; it takes an earlier one's place."""
        self._wish = wish
        self._write(WISH, encode(wish))

    def keep_life(self, life: KeptLife) -> None:
        """Remember how far generations have come, and what was cleared."""
        if life != self.life:
            self.life = life
            self._write(bequest.LIFE, encode(life))

    @property
    def has_kept_life(self) -> bool:
        """Whether the next life will know it."""
        with self._lock:
            return bequest.LIFE not in self._unwritten

    def _write(self, name: str, value: bytes | None) -> None:
        with self._lock:
            self._unwritten[name] = value
        self._news.set()

    # Its own thread

    def _run(self) -> None:
        has_complained, pause_s = False, self._first_pause_s
        while True:
            self._news.wait(self._first_pause_s)
            self._news.clear()
            try:
                self._write_all()
                self._look()
            except Exception as error:
                if not has_complained:
                    has_complained = True
                    logger.warning(
                        "orders wait, and new nodes get no pool (said once): %s", first_line(error)
                    )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, self._longest_pause_s)
            else:
                has_complained, pause_s = False, self._first_pause_s

    def _write_all(self) -> None:
        while True:
            with self._lock:
                if not self._unwritten:
                    return
                name, value = next(iter(self._unwritten.items()))
            within(GCS_S, partial(bequest.leave, name, value))
            with self._lock:
                # Unless there is a later value.
                if self._unwritten.get(name) is value:
                    self._unwritten.pop(name, None)

    def _look(self) -> None:
        """Make the NodeActors that are missing."""
        wish = self._wish
        if wish is None:
            return
        there = set(within(GCS_S, ask.named_actors))
        for node in within(GCS_S, ray.nodes):
            facts = facts_of(node)
            if not node["Alive"] or not wants(wish, facts) or name_of(facts) in there:
                continue
            logger.info("node %s gets a NodeActor", facts.node_id[:12])
            try:
                make_node_actor(self._address, facts.node_id, wish)
            except ClusterError as error:
                logger.warning("%s", error)


def _left() -> list[bequest.Entry]:
    """All that an earlier life has left; asks again where the head node is slow.

    Raises:
        ClusterError: it does not answer.
    """
    give_up_at = time.monotonic() + INHERIT_S
    while True:
        try:
            return within(GCS_S, lambda: list(bequest.entries()))
        except Exception as error:
            what = f"what an earlier life has left can't be read: {first_line(error)}"
            if time.monotonic() > give_up_at:
                raise ClusterError(what) from error
            logger.warning("%s", what)
        time.sleep(RECONCILE_PAUSES_S[0])
