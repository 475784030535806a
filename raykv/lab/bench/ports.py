"""TCP ports for the servers of benchmarks and tests."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of 127.0.0.1 on which nothing listened just now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    return port
