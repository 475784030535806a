"""PublisherActor: follows the event log and publishes it in vLLM's format on ZMQ sockets.

It only reads, as any reader does: a publisher that is slow, or not there,
costs nobody anything. Two threads: one follows the log, the other owns the sockets. Between them is
a short queue; when it is full the log waits, which has a bound of its own. A subscriber that does
not keep up loses messages at the high-water mark of its socket, sees a gap in the numbers, and asks
the replay socket.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec
import ray
import zmq

from raykv.base import deadlines
from raykv.base.errors import cause_of, first_line
from raykv.base.ids import Key, Namespace, NodeId
from raykv.base.threads import OnFailure, SupervisedThread, start_thread
from raykv.cluster import ask, logs
from raykv.protocol import descriptions, framing
from raykv.protocol.events import EventsMissed, PublisherSettings, PublisherStatus
from raykv.protocol.status import ClusterStatus
from raykv.stream import readers
from raykv.stream.format import WireFormat
from raykv.stream.publication import Message, NodePlace, Publication
from raykv.stream.wire import ChunkId

logger = logging.getLogger("raykv.publisher")

HIGH_WATER = 1000
"""Messages that wait for one subscriber; beyond it they are dropped for that one."""

REPLAY_HIGH_WATER = 20_000
"""The same for a subscriber that asks for missed messages: twice the number that is kept."""

QUESTIONS_HIGH_WATER = 16
"""Questions of one subscriber that wait; at this limit no more are read from it."""

MAX_MESSAGE_BYTES = 4096
"""Bytes of a frame that a subscriber sends: a number, a topic. A subscriber that sends a longer one
is cut off.
"""

MAX_RECEIVED_BYTES = 16 << 20
"""Bytes of a connection in all, that is, of 400,000 questions; then it is cut off, and a subscriber
with more questions makes another one, as ZMQ does by itself.
"""

MAX_QUEUED = 256
"""Messages between the two threads."""

MAX_EVENTS_AT_ONCE = 4096
"""Events of the log that are taken in before they are published; the last report is not cut."""

MAX_ASKED = 512
"""Chunks in one question for descriptions."""

MAX_QUESTIONS = 8
"""Questions asked before the answers so far are published."""

END_SEQ = (-1).to_bytes(8, "big", signed=True)
"""Ends an answer of the replay socket, with an empty payload."""

_LIFE_BITS = 20
"""Messages of one life in a second, as a power of two, before its numbers could meet the next's."""

_OWN = Path("/proc/self/fd")

_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""


_MOST_TIME = (1 << (62 - _LIFE_BITS)) - 1
"""In seconds: numbers have 63 bits, and some are left for a life to count."""


def first_number(wall_time: float) -> int:
    """Where a life's sequence numbers begin: above all those of earlier lives.

    A subscriber that has missed the end of one life and the beginning of the next sees a gap.
    The number fits into a message, whatever the clock says.
    """
    return min(max(0, int(wall_time)), _MOST_TIME) << _LIFE_BITS


class Sockets:
    """The two sockets, and the thread that owns them.

    Args:
        settings: where they are.
        host: of this node; what `*` in an endpoint stands for.
        replay: answers a question for what was missed, from a number and a topic's beginning on.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        host: str,
        replay: Callable[[int, str], list[Message]],
    ) -> None:
        self._settings = settings
        self._host = host
        self._replay_of = replay
        self._queue: Queue[Message] = Queue(MAX_QUEUED)
        self._stopped = threading.Event()
        self.error = "the sockets are not bound yet"
        self.endpoint = settings.endpoint
        self.replay_endpoint = settings.replay_endpoint
        self.num_dropped = 0
        self.num_replays = 0
        self._thread = SupervisedThread("raykv-sockets", self._run, OnFailure.END_PROCESS)

    def start(self) -> None:
        """Bind, again and again until it works, and serve."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopped.set()
        self._thread.join(timeout_s)

    def publish(self, message: Message) -> None:
        """Hand a message over; waits while the queue is full, until `stop`."""
        while not self._stopped.is_set():
            try:
                self._queue.put(message, timeout=deadlines.PROMPT_S)
                return
            except Full:
                continue

    def _run(self) -> None:
        context = zmq.Context()
        try:
            while not self._stopped.is_set():
                try:
                    self._serve(context)
                except Exception as error:
                    if not self.error:
                        logger.warning("publishing is interrupted: %s", first_line(error))
                    self.error = first_line(error)
                    self._stopped.wait(deadlines.IDLE_LOOK_S)
        finally:
            context.destroy(linger=0)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        with context.socket(zmq.PUB) as out, context.socket(zmq.ROUTER) as questions:
            for sock in (out, questions):
                sock.setsockopt(zmq.LINGER, 0)
                sock.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            out.set_hwm(HIGH_WATER)
            questions.setsockopt(zmq.SNDHWM, REPLAY_HIGH_WATER)
            questions.setsockopt(zmq.RCVHWM, QUESTIONS_HIGH_WATER)
            # An answer to a client that has left, or does not read, ends instead of being made for
            # nobody.
            questions.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.endpoint = place(out, self._settings.endpoint, self._host)
            if self._settings.replay_endpoint:
                questions.bind(_on_node(questions, self._settings.replay_endpoint, self._host))
                self.replay_endpoint = questions.getsockopt_string(zmq.LAST_ENDPOINT)
            self.error = ""
            ports = {_port(each) for each in (self.endpoint, self.replay_endpoint)} - {0}
            looked_at = 0.0
            while not self._stopped.is_set():
                if time.monotonic() - looked_at > deadlines.IDLE_LOOK_S:
                    _cut_off_floods(ports, MAX_RECEIVED_BYTES)
                    looked_at = time.monotonic()
                if self._settings.replay_endpoint and questions.poll(0):
                    self._answer(questions)
                try:
                    # Questions for what was missed, and the end, are looked for in between.
                    message = self._queue.get(timeout=deadlines.LOOK_S)
                except Empty:
                    continue
                self._send(out, message)

    def _send(self, out: zmq.Socket[bytes], message: Message) -> None:
        """Send to all subscribers except those whose queue is full."""
        frames = _frames(message)
        out.setsockopt(zmq.XPUB_NODROP, 1)
        try:
            out.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            self.num_dropped += 1
            out.setsockopt(zmq.XPUB_NODROP, 0)
            out.send_multipart(frames, zmq.DONTWAIT)

    def _answer(self, questions: zmq.Socket[bytes]) -> None:
        """vLLM's protocol: a number in, messages from it on out, then the end. A topic may follow.

        What is no such question is not answered.
        """
        frames = questions.recv_multipart(zmq.DONTWAIT)
        who, *rest = frames
        if len(rest) not in (2, 3) or rest[0] or len(rest[1]) != len(END_SEQ):
            logger.debug("a question of %d frames is no question for events", len(frames))
            return
        start = int.from_bytes(rest[1], "big")
        topic = rest[2].decode(errors="replace") if len(rest) > 2 else ""
        try:
            for message in self._replay_of(start, topic):
                questions.send_multipart([who, b"", *_frames(message)], zmq.DONTWAIT)
            questions.send_multipart([who, b"", b"", END_SEQ, b""], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            logger.debug("an answer to a question for events is broken off: %s", error)
            return
        self.num_replays += 1


def place(sock: zmq.Socket[bytes], endpoint: str, host: str) -> str:
    """Bind a socket to wildcards and files, connect it to anything else, as vLLM does.

    A `*` is the address `host`, not every interface: that has to be asked for, as 0.0.0.0 or [::].
    Returns the address that it has.
    """
    wildcards = ("ipc://", "tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::")
    if endpoint.startswith(wildcards) or "*" in endpoint:
        sock.bind(_on_node(sock, endpoint, host))
        return sock.getsockopt_string(zmq.LAST_ENDPOINT)
    sock.connect(endpoint)
    return endpoint


def _on_node(sock: zmq.Socket[bytes], endpoint: str, host: str) -> str:
    """The endpoint with `host` in place of a `*`."""
    if ":" in host or "::" in endpoint:
        sock.setsockopt(zmq.IPV6, 1)
    bracketed = f"[{host}]" if ":" in host else host
    return endpoint.replace("tcp://*:", f"tcp://{bracketed}:", 1)


def _port(endpoint: str) -> int:
    """Port of a TCP address; 0 for any other."""
    port = endpoint.rpartition(":")[2]
    return int(port) if endpoint.startswith("tcp://") and port.isdigit() else 0


def _frames(message: Message) -> list[bytes]:
    return [message.topic.encode(), message.seq.to_bytes(8, "big"), message.payload]


class PublisherActor:
    """Runs as the detached Ray actor `events` in the namespace `raykv`.

    `status` waits at most for a picture of all that is held, while a subscriber is given one.
    """

    def __init__(self, settings: PublisherSettings) -> None:
        logs.set_up_logging()
        self._settings = settings
        self._publication = Publication(
            WireFormat(settings.form, settings.hashes),
            settings.topic,
            first_number(time.time()),
            msgspec.msgpack.encode,
        )
        self._insides = readers.Insides(ask.node_actors, deadlines.PROMPT_S)
        # Guards the publication: both threads use it, and `status`.
        self._lock = threading.Lock()
        self._sockets = Sockets(settings, ray.util.get_node_ip_address(), self._missed)
        self._error = ""
        self._sockets.start()
        start_thread("raykv-follow", self._follow, OnFailure.END_PROCESS)

    def status(self) -> bytes:
        """→ `PublisherStatus`."""
        sockets, settings = self._sockets, self._settings
        with self._lock:
            publication = self._publication
            status = PublisherStatus(
                endpoint=sockets.endpoint,
                replay_endpoint=sockets.replay_endpoint,
                topic=settings.topic,
                format=settings.form,
                hashes=settings.hashes,
                pid=os.getpid(),
                streams=publication.num_streams,
                held=publication.num_held,
                waiting=publication.num_waiting,
                **publication.counters,
                dropped=sockets.num_dropped,
                replays=sockets.num_replays,
                error=sockets.error or self._error,
            )
        return framing.encode(status)

    def _missed(self, start: int, topic: str) -> list[Message]:
        with self._lock:
            return self._publication.replay(start, topic, time.time())

    # The thread that follows the log

    def _follow(self) -> None:
        while True:
            try:
                self._restart()
                while True:
                    self._take_events()
                    self._take_names()
                    self._take_descriptions()
                    self._publish()
                    time.sleep(deadlines.IDLE_LOOK_S)
            except Exception as error:
                if not self._error:
                    logger.warning("the event log can't be read: %s", first_line(cause_of(error)))
                self._error = first_line(cause_of(error))
                time.sleep(deadlines.AGAIN_S)

    def _restart(self) -> None:
        snapshot = readers.take_snapshot(ask.find_scheduler_actor, ask.node_actors)
        self._error = ""
        with self._lock:
            self._publication.restart(snapshot, time.monotonic())

    def _take_events(self) -> None:
        log = readers.read_events(ask.find_scheduler_actor, self._publication.place, follow=False)
        events = list(readers.whole_reports(log, MAX_EVENTS_AT_ONCE))
        if any(isinstance(event, EventsMissed) for event in events):
            self._restart()
            return
        now = time.monotonic()
        with self._lock:
            for event in events:
                self._publication.apply(event, now)

    def _take_names(self) -> None:
        """What topics call nodes and models."""
        with self._lock:
            nodes, namespaces = self._publication.unnamed
        if nodes:
            places = _node_places()
            with self._lock:
                self._publication.nodes.update(places)
        if namespaces:
            models = _models()
            with self._lock:
                self._publication.models.update(
                    {name: model for name, model in models.items() if name in namespaces}
                )

    def _take_descriptions(self) -> None:
        for _ in range(MAX_QUESTIONS):
            with self._lock:
                asked = self._publication.questions(time.monotonic(), MAX_ASKED)
            if not asked:
                return
            rows = self._described(asked)
            with self._lock:
                self._publication.answer(asked, rows, time.monotonic())

    def _described(self, asked: list[ChunkId]) -> dict[ChunkId, descriptions.Description]:
        rows: dict[ChunkId, descriptions.Description] = {}
        for namespace in {name[0] for name in asked}:
            keys = [key for of, key in asked if of == namespace]
            found = self._insides.describe(keys, namespace).values()
            rows |= {(Namespace(row.namespace), Key(row.key)): row for row in found}
        return rows

    def _publish(self) -> None:
        with self._lock:
            messages = self._publication.take_messages(time.time())
        for message in messages:
            self._sockets.publish(message)


def _node_places() -> Mapping[NodeId, NodePlace]:
    return {
        NodeId(node["NodeID"]): NodePlace(
            ip=str(node["NodeManagerAddress"]), host=str(node["NodeManagerHostname"])
        )
        for node in ray.nodes()  # bounded: Ray's own deadline; a thread of its own
    }


def _models() -> Mapping[Namespace, str]:
    """The model that engines serve in each namespace."""
    scheduler = ask.find_scheduler_actor()
    told = ask.answer(scheduler, "status", timeout_s=deadlines.CLIENT_S)
    known = ask.received(ClusterStatus, told)
    return {Namespace(engine.namespace): engine.model for engine in known.engines}


def _cut_off_floods(ports: Collection[int], most_bytes: int) -> int:
    """Cut off TCP connections of this process, to one of the ports, that have sent more than that.

    ZMQ bounds a message's frames but not their number, nor a subscriber's subscriptions: all of
    them are kept in memory until a message is whole. What the kernel has counted is a bound for
    both. ZMQ sees a connection end, and gives up what was incomplete.

    Returns:
        How many there were.
    """
    return sum(_cut_off(int(each.name), ports, most_bytes) for each in _OWN.iterdir())


def _cut_off(fd: int, ports: Collection[int], most_bytes: int) -> bool:
    try:
        # Its owner may close it meanwhile, and its number may go to another one.
        own = os.dup(fd)
    except OSError:
        return False
    try:
        connection = socket.socket(fileno=own)
    except OSError:
        # A file.
        os.close(own)
        return False
    with connection:
        try:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return False
            if connection.type != socket.SOCK_STREAM or connection.getsockname()[1] not in ports:
                return False
            told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
            if len(told) < _RECEIVED.size or _RECEIVED.unpack(told)[0] <= most_bytes:
                return False
            # The sender learns of it at once, not only when it has sent all.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False
    return True
