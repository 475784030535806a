"""The publisher's sockets with real ZMQ subscribers: slow ones, dead ones, and those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import zmq

from raykv.actors import publisher
from raykv.actors.publisher import Sockets, first_number
from raykv.core.publication import Message
from raykv.publisher_types import PublisherSettings
from tests.waiting import wait_until

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
        self.sockets = Sockets(PublisherSettings("tcp://*:0", "tcp://127.0.0.1:*"), self._replay)
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


def address(endpoint: str) -> str:
    return endpoint.replace("0.0.0.0", "127.0.0.1")


@contextmanager
def subscribed(
    context: zmq.Context[zmq.Socket[bytes]], running: Publisher, **options: int
) -> Iterator[zmq.Socket[bytes]]:
    """A subscriber that has heard something, so that it hears all that follows."""
    with context.socket(zmq.SUB) as socket:
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        socket.connect(address(running.sockets.endpoint))
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
        socket.connect(address(running.sockets.replay_endpoint))
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
        socket.connect(address(running.sockets.replay_endpoint))
        socket.send_multipart(question)
        socket.send_multipart([b"", (9).to_bytes(8, "big")])
        assert len(socket.recv_multipart()) == 4
    assert running.asked == [(9, "")]


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
        sockets = Sockets(PublisherSettings(endpoint), lambda _start, _topic: [])
        sockets.start()
        wait_until(lambda: "in use" in sockets.error, 5.0, "the port is taken")
    wait_until(lambda: not sockets.error, 5.0, "the port is free")
    sockets.stop(5.0)


def test_numbers_of_a_later_life_are_higher() -> None:
    began = 1_800_000_000.5
    assert 0 < first_number(began) < first_number(began + 1.0) < 1 << 63
    assert first_number(began + 1.0) - first_number(began) > 1_000_000
