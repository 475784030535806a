"""What the other tests of hosts rest on: hosts are apart, and links do what they are told."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raykv.lab.hosts.network import Host, Network
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.hosts

PORT = 4000
ANSWER = f"""
import socket
line = socket.create_server(("", {PORT}))
while True:
    with line.accept()[0] as peer:
        if size := int(peer.makefile().readline()):
            peer.sendall(bytes(size))
"""
ASK = f"""
import socket, sys, time
began = time.monotonic()
with socket.create_connection((sys.argv[1], {PORT}), 1.0) as line:
    line.sendall(sys.argv[2].encode() + b"\\n")
    left = int(sys.argv[2])
    while left:
        left -= len(line.recv(left))
print(time.monotonic() - began)
"""
LISTEN = f"""
import socket, sys
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
line.bind(("", {PORT}))
line.settimeout(1.0)
print("listens", flush=True)
try:
    print(line.recv(10).decode())
except TimeoutError:
    print("nothing")
"""
SAY = f"""
import socket, sys
line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
line.sendto(b"hello", (sys.argv[1], {PORT}))
"""


def python(program: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-c", program, *arguments)


@contextlib.contextmanager
def started(host: Host, *command: str) -> Iterator[subprocess.Popen[str]]:
    inside = host.spaces.entering(*command)
    with subprocess.Popen(inside, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def arrives(source: Host, target: Host) -> bool:
    """Whether a message of one host reaches another one; nothing need come back."""
    with started(target, *python(LISTEN)) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        source.spaces.run(*python(SAY, target.address))
        return listener.stdout.readline() == "hello\n"


def seconds_for(source: Host, target: Host, num_bytes: int) -> float:
    return float(source.spaces.run(*python(ASK, target.address, str(num_bytes))))


def answers(source: Host, target: Host) -> bool:
    with contextlib.suppress(AssertionError):
        return seconds_for(source, target, 0) >= 0
    return False


@pytest.fixture
def hosts(network: Network) -> tuple[Host, Host]:
    return network.host("a"), network.host("b")


def test_hosts_have_their_own_names_addresses_processes_folders_and_clocks(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    for host in hosts:
        assert host.spaces.run("hostname").strip() == host.name
        assert f"inet {host.address}/32" in host.spaces.run("ip", "addr")
        # The first one, and `ps`.
        assert len(host.spaces.run("ps", "-e", "-o", "pid=").split()) == 2
    a.spaces.run("touch", "/tmp/mine", "/dev/shm/mine")
    assert "mine" not in b.spaces.run("ls", "/tmp", "/dev/shm")
    clock = python("import time; print(time.clock_gettime(time.CLOCK_BOOTTIME))")
    assert float(b.spaces.run(*clock)) - float(a.spaces.run(*clock)) > 80_000


def test_hosts_know_each_others_names_and_wait_for_no_others(hosts: tuple[Host, Host]) -> None:
    for host in hosts:
        for other in hosts:
            assert host.spaces.run("getent", "ahostsv4", other.name).split()[0] == other.address
    began = time.monotonic()
    with pytest.raises(AssertionError):
        hosts[0].spaces.run("getent", "hosts", "nobody.has.this.name")
    assert time.monotonic() - began < 1.0


def test_link_is_cut_in_one_direction_or_both_and_mended(
    network: Network, hosts: tuple[Host, Host]
) -> None:
    a, b = hosts
    assert arrives(a, b)
    assert arrives(b, a)
    with network.cut(a, b):
        assert not arrives(a, b)
        assert arrives(b, a)
    assert arrives(a, b)
    with network.unplugged(a):
        assert not arrives(a, b)
        assert not arrives(b, a)
    assert arrives(a, b)
    assert arrives(b, a)


def test_link_is_slowed_in_both_directions(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with started(a, *python(ANSWER)), started(b, *python(ANSWER)):
        wait_until(lambda: answers(a, b) and answers(b, a), 10.0, "both answer")
        with a.slowed(1 << 20):
            assert 0.5 < seconds_for(a, b, 1 << 20) < 2.0
            assert 0.5 < seconds_for(b, a, 1 << 20) < 2.0
        assert seconds_for(a, b, 1 << 20) < 0.5


def test_host_that_is_frozen_says_nothing_until_it_goes_on(hosts: tuple[Host, Host]) -> None:
    a, b = hosts
    with started(b, *python(ANSWER)):
        wait_until(lambda: answers(a, b), 10.0, "it answers")
        with b.frozen(), pytest.raises(AssertionError, match="timed out"):
            seconds_for(a, b, 10)
        assert answers(a, b)


def test_host_without_power_is_silent_and_begins_anew_with_its_disk(
    hosts: tuple[Host, Host],
) -> None:
    a, b = hosts
    b.spaces.run("touch", "/tmp/gone", str(b.disk / "kept"))
    with started(b, *python(ANSWER)) as answerer:
        wait_until(lambda: answers(a, b), 10.0, "it answers")
        b.lose_power()
        assert answerer.wait(5.0) != 0
    began = time.monotonic()
    with pytest.raises(AssertionError, match="timed out"):
        seconds_for(a, b, 0)
    assert time.monotonic() - began > 1.0
    b.boot()
    assert b.spaces.run("ls", "/tmp") == ""
    assert b.spaces.run("ls", str(b.disk)) == "kept\n"
    assert arrives(a, b)
    assert arrives(b, a)
