"""A line to a NodeActor on another host: its bytes go through calls, in order, or it ends."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import raykv.cluster.relay
from raykv.base.errors import AttachError
from raykv.base.ids import Lookup
from raykv.cluster.relay import PIECE_BYTES, Relay, RelayEnds
from raykv.protocol import wire
from raykv.protocol.node import NodeDescription
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.engine.scheduler import DEADLINE_S
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 20.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.cluster.relay, "RELAY_SILENT_S", 0.5)
    monkeypatch.setattr("raykv.base.deadlines.WAKE_S", 0.2)


class Calls:
    """Calls of the NodeActor; each fails with a `chance`."""

    def __init__(self, socket_name: str, chance: float = 0.0) -> None:
        self.ends = RelayEnds(socket_name)
        self.chance = chance
        self.num_failed = 0
        self._rng = random.Random(1)

    def __call__(self, deadline_s: float, method: str, *arguments: Any) -> bytes:
        if self._rng.random() < self.chance:
            self.num_failed += 1
            raise TimeoutError(f"no answer in {deadline_s} s")
        return getattr(self.ends, method.removeprefix("relay_"))(*arguments) or b""


@pytest.fixture
def echo() -> Iterator[str]:
    """The name of a socket that says what it hears."""
    name = f"raykv-test/echo/{time.monotonic_ns()}"
    listener = wire.listen(name)

    def serve(sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            while data := sock.recv(1 << 16):
                sock.sendall(data)

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(sock,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    yield name
    listener.shutdown(socket.SHUT_RDWR)
    accepting.join(LONG_S)
    listener.close()


def heard(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := sock.recv(1 << 16)):
        data += more
    return data


def test_bytes_come_back_in_order_whatever_their_number(echo: str) -> None:
    relay = Relay(Calls(echo))
    sock = wire.connect(relay.socket_name, LONG_S)
    said = random.Random(2).randbytes(3 * PIECE_BYTES + 17)
    saying = threading.Thread(target=sock.sendall, args=(said,))
    saying.start()
    assert heard(sock, len(said)) == said
    saying.join(LONG_S)
    sock.sendall(b"more")
    assert heard(sock, 4) == b"more"
    sock.close()
    relay.close()


def test_line_ends_where_a_call_fails(echo: str) -> None:
    calls = Calls(echo)
    relay = Relay(calls)
    sock = wire.connect(relay.socket_name, LONG_S)
    sock.sendall(b"one")
    assert heard(sock, 3) == b"one"
    calls.chance = 1.0
    assert heard(sock, 1) == b"", "nothing comes that would be out of order"
    sock.close()
    relay.close()


def test_other_users_are_let_in_by_nobody(echo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    relay = Relay(Calls(echo))
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    sock = wire.connect(relay.socket_name, LONG_S)
    assert heard(sock, 1) == b""
    sock.close()
    with pytest.raises(AttachError, match="must run under one user"):
        RelayEnds(echo).up("line", 0, b"one")
    relay.close()


def test_bytes_that_do_not_follow_end_their_line(echo: str) -> None:
    ends = RelayEnds(echo)
    ends.up("line", 0, b"one")
    with pytest.raises(AttachError, match="bytes of a line are missing: 3 of 5"):
        ends.up("line", 5, b"three")
    with pytest.raises(AttachError, match="the line has ended"):
        ends.up("other", 1, b"two")
    with pytest.raises(AttachError, match="hung up"):
        ends.down("line", 3)


def is_read() -> bool:
    return any(each.name == "raykv-relayed" for each in threading.enumerate())


def test_line_that_nobody_asks_any_more_ends(echo: str) -> None:
    """An engine's host has lost its power."""
    ends = RelayEnds(echo)
    ends.up("line", 0, b"one")
    assert ends.down("line", 0) == b"one"
    assert is_read()
    wait_until(lambda: not is_read(), LONG_S, "nobody reads it")
    with pytest.raises(AttachError):
        ends.down("line", 3)


@pytest.mark.parametrize("chance", [0.0, 0.05])
def test_engine_far_from_its_place_knows_what_is_there(chance: float) -> None:
    """Where calls fail, its line begins anew, and nothing is lost."""
    with PlayedPlace() as place:
        calls = Calls(place.name)
        relay = Relay(calls)

        def locate(_is_lost: bool) -> NodeDescription:
            size = place.description().pool_bytes
            name = relay.socket_name
            return NodeDescription("", "node", place.life, name, size, size, size, 1, 0)

        with EngineAt(place, locate=locate) as engine:
            place.store(*(key(number) for number in range(20)))
            engine.begin()
            calls.chance = chance
            for number in range(20, 60):
                place.store(key(number % 60))
                place.drop(key(number - 20))
                engine.session.drain()
                time.sleep(0.01)
            calls.chance = 0.0
            engine.until(lambda: engine.view.num_ready == 20, "it knows all")
            engine.until(lambda: engine.lookup(59) is Lookup.HIT, "it is at its place")
            engine.until(lambda: place.tells, "it says what it has to say")
        assert bool(calls.num_failed) is bool(chance)
        wait_until(lambda: not place.num_open, DEADLINE_S, "its line has ended")
        relay.close()
