"""The thread that reports to the scheduler actor, and hears of orders from it.

A report goes at once after silence, then as often as the last answer allows, and as a heartbeat.
Without a scheduler actor what it should know stays here, and the first orders are read where they
are kept: what a pool file holds can't wait for it. The node shows the number of orders when what
they clear is kept by its pool file and disk.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import ray

from raykv.base import deadlines
from raykv.base.errors import cause_of, first_line
from raykv.base.ids import Stamp
from raykv.base.threads import OnFailure, start_thread, within
from raykv.cluster import bequest, breaker, names
from raykv.node.keeper import PoolKeeper
from raykv.protocol import columns, engine, measures, node, operator
from raykv.protocol.framing import encode, receive

logger = logging.getLogger("raykv.node")

# For one report, which is answered in milliseconds. A report to a scheduler actor that has just
# died may wait in vain; the next one finds its successor.
NODE_REPORT_S = 2.0

SCHEDULER, HERE = "the scheduler actor", "the NodeActor"

MOST_PINS = 8
"""Pins whose keys are asked for between two reports."""

MOST_LOOKS = 8
"""Pieces of what has happened that are counted between two reports."""


class Reports:
    """See the module's docstring.

    Args:
        keeper: of this node's pool.
        stats: of the NodeActor now.
    """

    def __init__(self, keeper: PoolKeeper, stats: Callable[[], node.NodeStats]) -> None:
        self._keeper = keeper
        self._stats = stats
        self._scheduler: Any = None
        # The thread opens and closes it.
        self._breakers = breaker.Breakers(breaker.Pauses(*deadlines.RETRY_PAUSES_S))
        self._sent_at = self._next_at = 0.0
        # The number of orders that is shown, and a document that is not kept yet.
        self._shown: Stamp = engine.NOTHING_ORDERED
        self._document: operator.OrdersDocument | None = None
        # Digests of pins whose keys the scheduler actor does not know.
        self._unknown: set[bytes] = set()
        self._about = {"pid": os.getpid(), "hostname": socket.gethostname()}

    def start(self) -> None:
        """Report for ever."""
        start_thread("raykv-report", self._run, OnFailure.END_PROCESS)

    def breaker_report(self) -> measures.BreakerReport:
        """Whether the scheduler actor is left alone."""
        return self._breakers.report(time.monotonic())

    def _run(self) -> None:
        # What is stored before there are any counts as older than everything that was cleared.
        self._read_kept_orders()
        while True:
            self._wait()
            self._look()
            call = self._breakers.begin(names.SCHEDULER, time.monotonic())
            if call is not None:
                self._report_once(call)

    def _wait(self) -> None:
        """Until a report may go, and there is news, or a heartbeat is due."""
        now = time.monotonic()
        wait_s = self._breakers.wait_s(names.SCHEDULER, now)
        time.sleep(max(0.0, self._next_at - now, wait_s))
        lock, owner = self._keeper.lock, self._keeper.owner
        with lock:
            left_s = self._sent_at + deadlines.HEARTBEAT_S - time.monotonic()
            lock.wait_for(lambda: owner.has_news, max(0.0, left_s))

    def _look(self) -> None:
        """Count what has happened here."""
        keeper, owner = self._keeper, self._keeper.owner
        for _ in range(MOST_LOOKS):
            with keeper.lock:
                if not owner.follow(keeper.now()):
                    return

    def _report_once(self, call: int) -> None:
        try:
            self._report()
        except Exception as error:
            # No scheduler actor now: what it should know stays here until it is back.
            self._scheduler = None
            with self._keeper.lock:
                self._keeper.owner.reporting.give_up()
            reason = first_line(cause_of(error))
            if self._breakers.failed(names.SCHEDULER, call, time.monotonic(), reason):
                logger.warning("no report to the scheduler actor: %s", reason)
            if self._keeper.owner.orders.stamp == engine.NOTHING_ORDERED:
                self._read_kept_orders()
            return
        if self._breakers.worked(names.SCHEDULER):
            logger.warning("the scheduler actor takes reports again")

    def _report(self) -> None:
        keeper, owner = self._keeper, self._keeper.owner
        if self._document is not None:
            self._take(self._document)
        stats = self._stats()
        with keeper.lock:
            owner.stats = stats
            report = owner.report()
        report = msgspec.structs.replace(report, orders=self._shown, **self._about)
        self._sent_at = time.monotonic()
        answer = receive(self._call("report", encode(report)), node.ReportAnswer, SCHEDULER, HERE)
        self._next_at = time.monotonic() + answer.pause_ms / 1000
        with keeper.lock:
            now = keeper.now()
            owner.answered(answer, now, report.seq)
            told = owner.orders.told(now) if answer.wants_orders else None
            wants_document = owner.wants_document
            keeper.lock.notify_all()
        if told is not None:
            self._call("show_orders", encode(told))
        if wants_document:
            self._ask_for_orders()
        self._ask_for_pins()

    def _call(self, method: str, *arguments: bytes) -> Any:
        if self._scheduler is None:
            found = partial(ray.get_actor, names.SCHEDULER, namespace=names.RAY_NAMESPACE)
            self._scheduler = within(deadlines.ANSWER_S, found)
        ref = getattr(self._scheduler, method).remote(*arguments)
        return ray.get(ref, timeout=NODE_REPORT_S)

    # Orders

    def _read_kept_orders(self) -> None:
        """Take what the store of Ray's head has; no scheduler actor is needed for that."""
        try:
            kept = within(deadlines.ANSWER_S, bequest.orders)
            if kept is not None:
                self._take(kept)
        except Exception as error:
            logger.warning("can't read the orders from Ray's head node: %s", first_line(error))

    def _ask_for_orders(self) -> None:
        raw = self._call("orders")
        if raw:
            self._take(receive(raw, operator.OrdersDocument, SCHEDULER, HERE))
        else:
            # An engine may have named orders that do not exist.
            soonest = time.monotonic() + deadlines.RETRY_PAUSES_S[0]
            self._next_at = max(self._next_at, soonest)

    def _take(self, document: operator.OrdersDocument) -> None:
        """Do what a document says, and show its number from when what it clears is kept."""
        is_kept = self._keeper.take_orders(document, deadlines.PROMPT_S)
        self._document = None if is_kept else document
        if is_kept:
            self._shown = max(self._shown, document.stamp)
            self._sent_at = 0.0

    def _ask_for_pins(self) -> None:
        """Ask for keys of pins that are not known here, now for some and then for others."""
        keeper, owner = self._keeper, self._keeper.owner
        with keeper.lock:
            wanted = owner.orders.wanted()
        self._unknown &= set(wanted)
        if len(self._unknown) == len(wanted):
            self._unknown.clear()
        for digest in [each for each in wanted if each not in self._unknown][:MOST_PINS]:
            raw = self._call("pin_keys", digest)
            found = receive(raw, columns.NamedKeys, SCHEDULER, HERE) if raw else ()
            if not found:
                self._unknown.add(digest)
                continue
            namespace = next(iter(found))[0]
            with keeper.lock:
                owner.orders.pin_keys(digest, namespace, [key for _, key in found])
                keeper.lock.notify_all()
