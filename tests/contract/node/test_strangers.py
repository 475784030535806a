"""What connects to a NodeActor and is no worker, and what keeps it from taking connections."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NodeId
from raykv.node.attached import receive_hello
from raykv.node.keeper import PoolKeeper
from raykv.node.service import NodeService, boot_life
from raykv.protocol import wire
from tests.fixtures.waiting import wait_until

LONG_S = 10.0


def test_attach_message_that_comes_bit_by_bit_has_one_deadline() -> None:
    near, far = socket.socketpair()
    stopped = threading.Event()

    def trickle() -> None:
        near.sendall((1000).to_bytes(4, "little"))
        while not stopped.wait(0.02):
            near.sendall(b"x")

    with near, far:
        thread = threading.Thread(target=trickle)
        thread.start()
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            receive_hello(far, wire.FrameReader(), 0.3)
        assert time.monotonic() - started < LONG_S / 2
        stopped.set()
        thread.join(LONG_S)


class FullListener:
    """A listening socket of a process that has too many open files, for a while."""

    def __init__(self, name: str) -> None:
        self.sock = wire.listen(name)
        self.num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        """See `socket.accept`."""
        if self.num_refused < 2:
            self.num_refused += 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.sock.accept()

    def shutdown(self, how: int) -> None:
        """See `socket.shutdown`."""
        self.sock.shutdown(how)

    def close(self) -> None:
        """See `socket.close`."""
        self.sock.close()


def test_node_takes_connections_again_when_it_has_descriptors_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.01)
    name = f"raykv-test/{os.getpid()}/full"
    keeper = PoolKeeper(NodeId("node"), boot_life(), PoolGeometry(4096, 4096))
    service = NodeService(name, keeper)
    listener = FullListener(name)
    monkeypatch.setattr(service, "_listener", listener)
    accepting = threading.Thread(target=service._accept)
    accepting.start()
    with wire.connect(name, LONG_S) as sock:
        sock.sendall(b"\xff" * 4)
        assert sock.recv(1) == b""
    assert listener.num_refused == 2
    service.stop()
    wait_until(lambda: not accepting.is_alive(), LONG_S, "the thread ends")
