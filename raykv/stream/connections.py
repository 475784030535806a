"""Connections that a library of this process has taken, and how much came in through each.

ZMQ bounds a message's frames but not their number, nor a subscriber's subscriptions: all of them
are kept in memory until a message is whole. What the kernel has counted is a bound for both.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from pathlib import Path

_OWN = Path("/proc/self/fd")

_RECEIVED = struct.Struct("=128xQ")
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""


def cut_off(ports: Collection[int], most_bytes: int) -> int:
    """Cut off the TCP connections to one of the ports that have sent more than that. Their owner
    sees them end and gives up what was incomplete.

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
