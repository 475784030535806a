"""A server for clients: a process with all that it starts, from its start to its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from raykv.base.errors import RayKVError
from raykv.lab.bench.client.figures import counter
from raykv.lab.warden import MARK

READY_S = 240.0
"""For a server's start: 20 s on a quiet machine, and 80 s on a busy one."""

CALM_S, CALM_LOOK_S, CALM_SHARE = 60.0, 2.0, 0.25
"""How long a server may go on with its start, and what of a core it takes when it has ended."""

LOOK_S = 0.5
ANSWER_S = 20.0
STOP_S = 30.0
TAIL = 3000


class ServerError(RayKVError):
    """A server did not start, or a client failed; the message ends with its log."""


class Server:
    """A server that answers at a port of this host.

    Raises:
        ServerError: it ended, or did not answer in time.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], port: int, log: Path
    ) -> None:
        self._port = port
        self._log = log
        self._process = _started(command, environment, log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + READY_S
        while time.monotonic() < give_up_at:
            if self._process.poll() is not None:
                raise ServerError(f"the server has ended; {tail(self._log)}")
            with contextlib.suppress(urllib.error.URLError, OSError):
                self._get("/health")
                return
            time.sleep(LOOK_S)
        raise ServerError(f"the server did not answer within {READY_S:g} s; {tail(self._log)}")

    def _get(self, path: str) -> str:
        address = f"http://127.0.0.1:{self._port}{path}"
        with urllib.request.urlopen(address, timeout=ANSWER_S) as answer:
            text: str = answer.read().decode()
        return text

    def tokens_found(self) -> float:
        """Tokens of prompts so far that were not computed, whatever cache they came from."""
        return counter(self._get("/metrics"), "vllm:prompt_tokens_cached_total")

    def stop(self) -> None:
        """End it in good order, else by force, and what it has started."""
        started = [self._process.pid]
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._process.pid).children(recursive=True)
            started += [child.pid for child in children]
        processes = [each for each in map(_process, started) if each is not None]
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        for each in processes:
            with contextlib.suppress(psutil.Error):
                each.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)


def _started(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> subprocess.Popen[bytes]:
    """A process in a group of its own, which writes all into a log."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
        )


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def run_client(
    command: Sequence[str], environment: Mapping[str, str], log: Path, deadline_s: float
) -> None:
    """Run a client to its end.

    Raises:
        ServerError: it failed, or did not end in time; then it is killed.
    """
    process = _started(command, environment, log)
    try:
        status = process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        raise ServerError(f"the client took more than {deadline_s:g} s; {tail(log)}") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_S)
    if status:
        raise ServerError(f"the client has failed with status {status}; {tail(log)}")


def tail(log: Path) -> str:
    """The end of a log, for an error."""
    text = log.read_text(errors="replace")[-TAIL:]
    return f"its log ends with:\n{text}" if text.strip() else "its log is empty"


def cpu_times() -> dict[int, float]:
    """CPU seconds so far of all that this command has started, by process.

    What Ray's daemons start is not a descendant of the command, but of what bears its mark.
    """
    own = psutil.Process()
    found = set(own.children(recursive=True))
    mark = os.environ.get(MARK, "")
    if mark:
        for each in psutil.process_iter():
            if each != own and each not in found and _is_marked(each, mark):
                found |= {each, *each.children(recursive=True)}
    times = {}
    for each in found:
        with contextlib.suppress(psutil.Error):
            spent = each.cpu_times()
            times[each.pid] = spent.user + spent.system
    return times


def wait_until_calm() -> None:
    """Wait until what was started does nothing any more: memory is touched and code compiled for
    seconds after a start. Or a deadline.
    """
    give_up_at = time.monotonic() + CALM_S
    before = cpu_times()
    while time.monotonic() < give_up_at:
        time.sleep(CALM_LOOK_S)
        after = cpu_times()
        if cpu_seconds(before, after) < CALM_SHARE * CALM_LOOK_S:
            return
        before = after


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    except OSError:
        return False


def cpu_seconds(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Spent in between by those that are there after it."""
    return sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
