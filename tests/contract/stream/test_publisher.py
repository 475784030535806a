"""The publisher's sockets with real ZMQ subscribers: slow ones, dead ones, and those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from socket import create_connection
from typing import Any

import psutil
import pytest
import zmq

from raykv.protocol.events import PublisherSettings
from raykv.stream import publisher
from raykv.stream.publication import Message
from raykv.stream.publisher import Sockets, first_number
from tests.fixtures.waiting import wait_until

WAIT_MS = 10_000
TOPIC = "kv@node@model"


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


class Publisher:
    """Sockets on free ports, and the messages that they are asked for."""

    def __init__(self) -> None:
        self.kept: list[Message] = []
        self.asked: list[tuple[int, str]] = []
        settings = PublisherSettings("tcp://*:0", "tcp://127.0.0.1:*")
        self.sockets = Sockets(settings, "127.0.0.1", self._replay)
        self.sockets.start()
        wait_until(lambda: not self.sockets.error, 5.0, "the sockets are bound")

    def _replay(self, start: int, topic: str) -> list[Message]:
        self.asked.append((start, topic))
        return [message for message in self.kept if message.seq >= start]

    def publish(self, seq: int, payload: bytes = b"payload") -> None:
        message = Message(TOPIC, seq, payload)
        self.kept.append(message)
        self.sockets.publish(message)


@pytest.fixture
def running() -> Iterator[Publisher]:
    made = Publisher()
    yield made
    made.sockets.stop(5.0)


@contextmanager
def subscribed(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher, **options: int
) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber that has heard something, so that it hears all that follows."""
    with context.socket(zmq.SUB) as socket:
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(running.sockets.endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")

        def hears() -> bool:
            running.sockets.publish(Message("kv@hello", 0, b"x"))
            return bool(socket.poll(50))

        wait_until(hears, 10.0, "the subscription has arrived")
        yield socket


def heard(socket: zmq.Socket[bytes]) -> list[bytes]:
    """The next message that is not the greeting."""
    while True:
        frames = socket.recv_multipart()
        if frames[0] != b"kv@hello":
            return list(frames)


def test_message_has_topic_number_and_payload(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher
) -> None:
    with subscribed(context, running) as socket:
        running.publish(258)
        assert heard(socket) == [TOPIC.encode(), (258).to_bytes(8, "big"), b"payload"]


def test_replay_answers_from_a_number_on_and_ends_with_minus_one(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher
) -> None:
    """As vLLM's publisher does: an empty frame, topic, number and payload; the end has none."""
    for seq in range(5):
        running.publish(seq)
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(running.sockets.replay_endpoint)
        for start, topic in ((3, []), (5, [b"kv@"])):
            socket.send_multipart([b"", start.to_bytes(8, "big"), *topic])
            for seq in range(start, 5):
                expected = [b"", TOPIC.encode(), seq.to_bytes(8, "big"), b"payload"]
                assert socket.recv_multipart() == expected
            end = (-1).to_bytes(8, "big", signed=True)
            assert socket.recv_multipart() == [b"", b"", end, b""]
    assert running.asked == [(3, ""), (5, "kv@")]
    # Counted once the answer has been sent.
    wait_until(lambda: running.sockets.num_replays == 2, 5.0, "both answers are counted")


@pytest.mark.parametrize(
    "question",
    [[b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"", b""], [b"", b"x" * 100]],
    ids=repr,
)
def test_question_that_is_none_gets_no_answer_and_the_next_one_does(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher, question: list[bytes]
) -> None:
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(running.sockets.replay_endpoint)
        socket.send_multipart(question)
        socket.send_multipart([b"", (9).to_bytes(8, "big")])
        assert len(socket.recv_multipart()) == 4
    assert running.asked == [(9, "")]


def ends_of(frames: list[bytes]) -> bool:
    return frames[-1] == b"" and len(frames) == 4


@pytest.mark.parametrize("place", ["question", "topic", "subscription"])
def test_message_that_is_too_long_is_not_taken_in(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher, place: str
) -> None:
    """The connection ends; who has not said it is served on."""
    long = bytes(publisher.MAX_MESSAGE_BYTES + 1)
    kind, endpoint = zmq.DEALER, running.sockets.replay_endpoint
    if place == "subscription":
        kind, endpoint = zmq.XSUB, running.sockets.endpoint
    with context.socket(kind) as socket, context.socket(zmq.DEALER) as other:
        ends = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(endpoint)
        frames = {
            "question": [b"", long],
            "topic": [b"", bytes(8), long],
            "subscription": [b"\1" + long],
        }
        socket.send_multipart(frames[place])
        assert ends.poll(WAIT_MS)
        socket.disable_monitor()
        ends.close()
        other.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        other.connect(running.sockets.replay_endpoint)
        other.send_multipart([b"", (9).to_bytes(8, "big")])
        assert ends_of(other.recv_multipart())
    assert running.asked == [(9, "")]


def test_answer_to_who_does_not_read_it_ends_and_the_others_get_theirs(
    context: zmq.Context[zmq.Socket[bytes]],
    running: Publisher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running.kept = [Message(TOPIC, seq, bytes(1000)) for seq in range(3 * publisher.HIGH_WATER)]
    sent: list[int] = []
    frames_of = publisher._frames

    def frames(message: Message) -> list[bytes]:
        sent.append(message.seq)
        return frames_of(message)

    monkeypatch.setattr(publisher, "_frames", frames)
    with context.socket(zmq.DEALER) as deaf, context.socket(zmq.DEALER) as other:
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4096)
        deaf.connect(running.sockets.replay_endpoint)
        for _ in range(10):
            deaf.send_multipart([b"", bytes(8)])
        other.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        other.connect(running.sockets.replay_endpoint)
        last = 3 * publisher.HIGH_WATER - 1
        other.send_multipart([b"", last.to_bytes(8, "big")])
        while int.from_bytes(other.recv_multipart()[2], "big") != last:
            pass
        assert ends_of(other.recv_multipart())
        wait_until(lambda: len(running.asked) == 11, 30.0, "all questions are looked at")
    assert len(sent) < 10 * len(running.kept)


def exactly(connection: Any, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        assert part, "the connection has ended"
        found += part
    return found


def greeted(endpoint: str, kind: bytes) -> Any:
    """A connection that has introduced itself, without the library, as ZMTP 3.0 has it."""
    made = create_connection(("127.0.0.1", int(endpoint.rpartition(":")[2])), 10.0)
    made.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
    exactly(made, 64)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    made.sendall(b"\x04" + bytes([len(ready)]) + ready)
    exactly(made, exactly(made, 2)[1])
    return made


@pytest.mark.parametrize("place", ["question", "subscriptions"])
def test_subscriber_that_floods_the_sockets_is_cut_off_and_the_others_are_served(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher, place: str
) -> None:
    """A question of frames without end, which no library sends, and subscriptions without end."""
    sockets = running.sockets
    is_question = place == "question"
    endpoint, kind = (
        (sockets.replay_endpoint, b"DEALER") if is_question else (sockets.endpoint, b"SUB")
    )
    body = b"\x01" + bytes(3999)
    frame = (b"\x03" if is_question else b"\x02") + len(body).to_bytes(8, "big") + body
    with greeted(endpoint, kind) as flood, subscribed(context, running) as other:

        def send_for_ever() -> None:
            for number in range(1_000_000):
                flood.sendall(frame)
                if number % 100 == 0:
                    # Subscriptions are taken in when something is published.
                    sockets.publish(Message("kv@hello", 0, b"x"))

        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever()
        running.publish(7)
        assert heard(other)[2] == b"payload"
    assert not sockets.error


def test_subscriber_that_does_not_read_loses_messages_and_the_others_none(
    context: zmq.Context[zmq.Socket[bytes]],
    running: Publisher,
) -> None:
    """The slow one sees the gap by the numbers; what it has lost is counted."""
    payload = bytes(100_000)
    with (
        subscribed(context, running, RCVHWM=1, RCVBUF=4096) as slow,
        subscribed(context, running) as fast,
    ):
        last = 3 * publisher.HIGH_WATER
        for seq in range(1, last + 1):
            running.publish(seq, payload)
            assert heard(fast)[1] == seq.to_bytes(8, "big")
        assert running.sockets.num_dropped > 0
        # It reads again, and hears of a number that does not follow.
        numbers = [int.from_bytes(heard(slow)[1], "big")]
        while numbers[-1] < last + 1:
            running.publish(last + 1)
            numbers.append(int.from_bytes(heard(slow)[1], "big"))
        steps = [after - before for before, after in pairwise(numbers)]
        assert max(steps) > 1


def test_subscriber_that_dies_changes_nothing(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher
) -> None:
    with subscribed(context, running) as first:
        with subscribed(context, running):
            running.publish(1)
        running.publish(2)
        assert [heard(first)[1][-1] for _ in range(2)] == [1, 2]
    assert not running.sockets.error


def test_sockets_are_bound_as_soon_as_an_earlier_life_lets_go(
    context: zmq.Context[zmq.Socket[bytes]],
) -> None:
    with context.socket(zmq.PUB) as earlier:
        port = earlier.bind_to_random_port("tcp://127.0.0.1")
        endpoint = f"tcp://*:{port}"
        sockets = Sockets(PublisherSettings(endpoint), "127.0.0.1", lambda _start, _topic: [])
        sockets.start()
        wait_until(lambda: "in use" in sockets.error, 5.0, "the port is taken")
    wait_until(lambda: not sockets.error, 5.0, "the port is free")
    sockets.stop(5.0)


@pytest.mark.parametrize(
    ("endpoint", "replay", "expected"),
    [
        ("tcp://*:0", "tcp://*:0", {"127.0.0.2"}),
        ("tcp://*:*", "tcp://127.0.0.3:*", {"127.0.0.2", "127.0.0.3"}),
        ("tcp://0.0.0.0:*", "tcp://0.0.0.0:*", {"0.0.0.0"}),
        ("tcp://[::]:*", "tcp://[::]:*", {"::"}),
    ],
    ids=str,
)
def test_sockets_listen_at_the_nodes_address_unless_all_are_asked_for(
    endpoint: str, replay: str, expected: set[str]
) -> None:
    sockets = Sockets(PublisherSettings(endpoint, replay), "127.0.0.2", lambda _start, _topic: [])
    sockets.start()
    wait_until(lambda: not sockets.error, 5.0, "the sockets are bound")
    ports = {int(each.rpartition(":")[2]) for each in (sockets.endpoint, sockets.replay_endpoint)}
    listening = {
        each.laddr.ip
        for each in psutil.Process().net_connections("inet")
        if each.status == psutil.CONN_LISTEN and each.laddr.port in ports
    }
    sockets.stop(5.0)
    assert len(ports) == 2
    assert listening == expected


def test_sockets_listen_at_an_address_of_ipv6() -> None:
    sockets = Sockets(PublisherSettings("tcp://*:0"), "::1", lambda _start, _topic: [])
    sockets.start()
    wait_until(lambda: not sockets.error, 5.0, "the socket is bound")
    sockets.stop(5.0)
    assert sockets.endpoint.startswith("tcp://[::1]:")


def test_numbers_of_a_later_life_are_higher() -> None:
    began = 1_800_000_000.5
    assert 0 < first_number(began) < first_number(began + 1.0) < 1 << 63
    # Clocks that nobody has set, or that are far ahead.
    assert 0 <= first_number(-1.0) <= first_number(0.0) < first_number(1.0) < first_number(1.7e9)
    assert first_number(1e18) < 1 << 62
    assert first_number(began + 1.0) - first_number(began) > 1_000_000
