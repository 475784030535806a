"""Processes of servers and clients, from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raykv.lab.bench.client.server import (
    Server,
    ServerError,
    cpu_seconds,
    cpu_times,
    run_client,
)
from raykv.lab.bench.ports import free_port

SERVING = """
import http.server, subprocess, sys

child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b"vllm:prompt_tokens_cached_total 128.0\\n")
        else:
            self.wfile.write(str(child.pid).encode())


http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_is_asked_and_ends_with_what_it_has_started(tmp_path: Path) -> None:
    port = free_port()
    others = psutil.Process().children(recursive=True)
    command = [sys.executable, "-c", SERVING, str(port)]
    server = Server(command, os.environ, port, tmp_path / "log")
    assert server.tokens_found() == 128.0
    children = set(psutil.Process().children(recursive=True)) - set(others)
    assert len(children) >= 2
    server.stop()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive


def test_server_that_ends_says_so_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(ServerError, match=r"has ended; its log ends with:\nno such model"):
        Server(command, os.environ, free_port(), tmp_path / "log")


def test_client_that_fails_says_so_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('refused')"]
    with pytest.raises(ServerError, match=r"(?s)status 1; .*refused"):
        run_client(command, os.environ, tmp_path / "log", deadline_s=30.0)


def test_client_that_was_killed_and_had_said_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    with pytest.raises(ServerError, match=r"failed with status -9; its log is empty$"):
        run_client(command, os.environ, tmp_path / "log", deadline_s=30.0)


def test_client_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(ServerError, match=r"more than 0\.2 s"):
        run_client(command, os.environ, tmp_path / "log", deadline_s=0.2)


def test_cpu_seconds_are_those_of_what_was_started() -> None:
    busy = "import sys\nwhile True: pass"
    before = cpu_times()
    with subprocess.Popen([sys.executable, "-c", busy]) as process:
        try:
            spent = psutil.Process(process.pid)
            while spent.cpu_times().user < 0.2:
                assert process.poll() is None
            found = cpu_seconds(before, cpu_times())
        finally:
            process.kill()
    assert found >= 0.2
    assert cpu_seconds({1: 5.0, 2: 1.0}, {1: 5.5, 3: 2.0}) == 2.5
