"""What connects to a NodeActor and is no worker."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from raykv.node.attached import receive_hello
from raykv.protocol import wire

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
