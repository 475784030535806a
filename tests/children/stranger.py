"""A process on a host that is no member: tries every port of an address, without any token.

stranger.py ADDRESS      prints {port: what answers} as JSON
"""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import grpc

CONNECT_S = 2.0
SETTINGS = b"\x04"
"""The type of the frame with which a server of HTTP/2 begins."""
METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo",
    "/ray.rpc.InternalKVGcsService/InternalKVKeys",
    "/ray.rpc.NodeManagerService/GetNodeStats",
    "/ray.rpc.ObjectManagerService/Pull",
    "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
    "/ray.rpc.ReporterService/GetTraceback",
    "/ray.rpc.LogService/ListLogs",
    "/ray.rpc.RayletDriver/ClusterInfo",
    "/ray.serve.ASGIService/HandleRequest",
)
"""One of each service that Ray has on its ports."""


def is_open(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), CONNECT_S).close()
    except ConnectionRefusedError:
        return False
    return True


def tried(address: str, port: int) -> str:
    """Return what a stranger receives at an open port."""
    try:
        with socket.create_connection((address, port), CONNECT_S) as line:
            line.sendall(
                f"GET /metrics HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()
            )
            line.settimeout(CONNECT_S)
            said = received(line)
    except OSError as error:
        return f"error {error}"
    if said.startswith(b"HTTP/1."):
        return (
            f"http {said.split()[1].decode()} "
            + ("raykv" if b"raykv_" in said else "")
            + (" vllm" if b"vllm:" in said else "")
        )
    if said[:1] == b"\xff":
        return "zmq"
    if said[3:4] != SETTINGS:
        return f"other {said[:20]!r}" if said else "silence"
    return f"grpc {' '.join(sorted(codes(f'{address}:{port}')))}"


def received(line: socket.socket) -> bytes:
    """Receive until the other end closes, or sends nothing for a while."""
    said = b""
    try:
        while more := line.recv(1 << 16):
            said += more
            if not said.startswith(b"HTTP/1."):
                break
    except TimeoutError:
        pass
    return said


def codes(target: str) -> set[str]:
    """How calls end that bring no token."""
    found = set()
    with grpc.insecure_channel(target) as channel:
        for method in METHODS:
            call = channel.unary_unary(method)
            try:
                call(b"", timeout=5.0)
                found.add(f"OK:{method}")
            except grpc.RpcError as error:
                found.add(error.code().name)
    return found


if __name__ == "__main__":
    address = sys.argv[1]
    ports = [port for port in range(1, 1 << 16) if is_open(address, port)]
    with ThreadPoolExecutor(len(ports)) as pool:
        print(json.dumps(dict(zip(ports, pool.map(partial(tried, address), ports), strict=True))))
