"""End everything that a command has started when the command ends, however it ends.

    command ── starts ──► warden: a process in a session of its own
       │                     │ looks at the command's descendants, again and again
       ├─ Ray, engines       │
       └─ ends ────────────► kills what is left of them, then ends
          (return, error, SIGTERM, SIGHUP, SIGKILL)

Engines are descendants; Ray's daemons are not, since `ray start` leaves them to init. They have
`MARK` in their environment, as everything has that the command starts. A process that changes its
title may lose its environment. So the warden looks for both, and for descendants of what it found.

`demo`, `bench` and `chaos` have a warden. `serve` ends its own cluster, `up` leaves one on purpose.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import psutil

# For a command that is asked to end: it ends its engines and its Ray in order, which takes a few
# seconds; after that it is killed, and its warden does the rest. Container managers kill after 30
# s.
COMMAND_END_S = 15.0

# How often a warden notes what the command has started: it costs a millisecond or two, and an
# engine lives longer than that before it changes its title.
WARDEN_LOOK_S = 1.0

# For killing what is left, in rounds: killed processes are gone within milliseconds.
WARDEN_SWEEP_S = 10.0

# For `raykv down` in a cluster that stays: joining it takes a second or two, and it has deadlines
# of its own.
WARDEN_DOWN_S = 60.0


MARK = "STARTED_BY_RAYKV"
"""Environment variable: a token for each command, the outermost first."""

_DONE = "done"
_DOWN = "down "


class Warden:
    """The command's end of the line to its warden."""

    def __init__(self, pid: int, orders: BinaryIO) -> None:
        self._process = psutil.Process(pid)
        self._orders = orders

    def note_actors(self, address: str) -> None:
        """Take down RayKV's actors in the cluster at `address` if the command can't.

        An empty address says that the command has done so itself.
        """
        self._tell(f"{_DOWN}{address}")

    def dismiss(self) -> None:
        """End the warden: the command has ended everything that it started."""
        self._tell(_DONE)
        with contextlib.suppress(psutil.Error):
            self._process.wait(COMMAND_END_S)

    def close(self) -> None:
        """End the line; the warden goes on."""
        with contextlib.suppress(OSError):
            self._orders.close()

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self._orders.write(f"{line}\n".encode())
            self._orders.flush()


@contextmanager
def ending_what_it_starts() -> Iterator[Warden]:
    """Run a warden meanwhile; SIGTERM and SIGHUP end the command in order, within
    `COMMAND_END_S`. For a command's main thread.

    An exception may leave something behind: then the warden watches until the process has ended.
    """
    before = os.environ.get(MARK)
    token = secrets.token_hex(8)
    warden = _spawn(token)
    os.environ[MARK] = f"{before or ''} {token}".strip()
    handlers = _handle_signals()
    try:
        yield warden
        warden.dismiss()
    finally:
        warden.close()
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before


def _spawn(token: str) -> Warden:
    """Not by `subprocess`, which warns of children that outlive their parent."""
    theirs, ours = os.pipe()
    # -P: what lies in the current folder is not imported.
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), token]
    pid = os.posix_spawn(
        sys.executable,
        command,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, theirs, 0),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    os.close(theirs)
    return Warden(pid, os.fdopen(ours, "wb"))


def _handle_signals() -> dict[signal.Signals, Any]:
    """Return the previous handlers; none outside the main thread, which alone may set handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    signals = (signal.SIGTERM, signal.SIGHUP)
    return {signum: signal.signal(signum, _end_in_order) for signum in signals}


def _end_in_order(signum: int, _frame: Any) -> None:
    """Unwind, which ends what was started. The kernel ends the command if that takes too long."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, COMMAND_END_S)
    raise SystemExit(128 + signum)


# The warden's own process


class _Watch:
    """The processes that a command has started, as far as the warden has seen them."""

    def __init__(self, pid: int, token: str) -> None:
        self._token = token.encode()
        self._own = psutil.Process()
        self._command: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._command = psutil.Process(pid)
        self._known: set[psutil.Process] = set()

    def look(self) -> None:
        """Note the command's descendants: one that ends leaves its children to init."""
        if self._command is not None:
            self._known |= _descendants(self._command)

    def left(self) -> set[psutil.Process]:
        """Return what still runs, without the command and the warden."""
        marked = {each for each in psutil.process_iter() if self._is_marked(each)}
        found = {each for each in self._known | marked if each.is_running()}
        for each in list(found):
            found |= _descendants(each)
        found = {each for each in found if _is_alive(each)}
        return found - {self._own, self._command}

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return self._token in Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            return False


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True))
    except psutil.Error:
        return set()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _watch(pid: int, token: str) -> None:
    try:
        ended = os.pidfd_open(pid)
    except OSError:
        ended = -1
    watch = _Watch(pid, token)
    orders, down = b"", ""
    sources = [0] if ended < 0 else [0, ended]
    while ended >= 0:
        watch.look()
        ready, _, _ = select.select(sources, [], [], WARDEN_LOOK_S)
        if 0 in ready:
            if not (read := os.read(0, 4096)):
                sources.remove(0)  # the command's end of the line is closed
            orders += read
            *lines, rest = orders.split(b"\n")
            orders = rest
            for line in map(bytes.decode, lines):
                if line == _DONE:
                    return
                down = line.removeprefix(_DOWN)
        if ended in ready:
            break
    _sweep(watch)
    if down:
        _take_down(down)


def _sweep(watch: _Watch) -> None:
    """Kill until nothing is left: a killed process may just have started another one."""
    give_up_at = time.monotonic() + WARDEN_SWEEP_S
    while (left := watch.left()) and time.monotonic() < give_up_at:
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=WARDEN_LOOK_S)


def _take_down(address: str) -> None:
    command = "from raykv.cli import main; main()"
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(
            [sys.executable, "-P", "-c", command, "down", "--address", address],
            timeout=WARDEN_DOWN_S,
            check=False,
        )


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
