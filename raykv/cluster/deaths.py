"""Which processes at the other end of a socket have died, and which will write nothing any more.

The end of a socket proves nothing: a forked child keeps the socket open, and with it all that hangs
on it. So the process itself is watched, through a pidfd.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import select
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from raykv.base import deadlines, errors, threads
from raykv.protocol import wire

logger = logging.getLogger("raykv.node")

SO_PEERPIDFD = 77
"""Linux 6.5, from its include/uapi/asm-generic/socket.h: of the very process that connected, even
if its number belongs to another one by now."""


MEMBARRIER = {"x86_64": 324, "aarch64": 283}
MEMBARRIER_CMD_GLOBAL = 1
"""Linux 4.3 and 4.16, from its system call tables and include/uapi/linux/membarrier.h."""


@dataclass(eq=False)
class Watch:
    """A connection whose other end is watched. `has_died`: the process there is no more."""

    sock: socket.socket
    pidfd: int | None
    has_died: bool = False


def kill(pidfd: int) -> bool:
    """Send SIGKILL; True: no thread of the process will return to its own code from now on.

    False: it is gone already, or can't be killed by us.
    """
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    # The first process of a process name space ignores signals from inside of it.
    return not _is_first(pidfd)


def has_halted(deadline_s: float) -> bool:
    """Whether no process that `kill` has killed runs its own code any more; False: not known.

    The kernel marks all threads of a process before the sender of SIGKILL goes on: a thread that
    waits, or that waits for a core, dies before its next instruction, and one that runs on another
    core is interrupted. `membarrier` waits for that: it returns when every core has been through
    the kernel since. Kernels with cores that are never interrupted (nohz_full), and some sandboxes,
    refuse it.
    """
    number = MEMBARRIER.get(platform.machine())
    if number is None:
        return False
    system_call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = [ctypes.c_long(each) for each in (number, MEMBARRIER_CMD_GLOBAL, 0, 0)]
    try:
        return threads.within(deadline_s, lambda: system_call(*arguments)) == 0
    except (TimeoutError, errors.ThreadError):
        return False


def _is_first(pidfd: int) -> bool:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name == "NSpid":
            return numbers.split()[-1:] == ["1"]
    return True


class DeathWatch:
    """Ends connections whose process has died; one thread for all of them."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lock = threading.Lock()
        self._watches: dict[int, Watch] = {}
        self._stopping = False
        self._has_complained = False

    def start(self) -> threads.SupervisedThread:
        """Begin; returns the thread, which ends after `stop`."""
        return threads.start_thread("raykv-deaths", self._run, threads.OnFailure.END_PROCESS)

    def stop(self) -> None:
        """End the thread the next time it looks."""
        self._stopping = True

    def watch(self, sock: socket.socket) -> Watch:
        """Shut the socket down, in both directions, as soon as its peer has died.

        Where the kernel does not let us watch, the socket's own end must do; that is logged once.

        Raises:
            AttachError: the peer has died already, or must not be served.
        """
        pid = wire.peer_of(sock)
        try:
            watch = Watch(sock, _pidfd_of(sock, pid))
        except ProcessLookupError as error:
            raise errors.AttachError(f"process {pid} has ended already") from error
        except OSError as error:
            self._complain(pid, error)
            return Watch(sock, None)
        assert watch.pidfd is not None
        with self._lock:
            self._watches[watch.pidfd] = watch
            self._epoll.register(watch.pidfd, select.EPOLLIN)
        return watch

    def unwatch(self, watch: Watch) -> None:
        """The connection has ended; a second call does nothing."""
        with self._lock:
            pidfd, watch.pidfd = watch.pidfd, None
            if pidfd is not None:
                if self._watches.pop(pidfd, None) is not None:
                    self._epoll.unregister(pidfd)
                os.close(pidfd)

    def _complain(self, pid: int, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "process %d can't be watched (%s): should it die and leave children behind, its "
                "memory is held until they have ended too (logged once)",
                pid,
                error.strerror,
            )

    def _run(self) -> None:
        while not self._stopping:
            for pidfd, _ in self._epoll.poll(deadlines.WAKE_S):
                self._end(pidfd)

    def _end(self, pidfd: int) -> None:
        with self._lock:
            # The number may be that of another process's pidfd by now.
            if pidfd not in self._watches or not wire.wait_readable([pidfd], 0):
                return
            watch = self._watches.pop(pidfd)
            self._epoll.unregister(pidfd)
            watch.has_died = True
            wire.hang_up(watch.sock)


def _pidfd_of(sock: socket.socket, pid: int) -> int:
    """A pidfd of the process at the other end.

    Raises:
        ProcessLookupError: it has ended.
        OSError: the kernel has no pidfds, or does not give us this one.
    """
    try:
        pidfd = sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError:
        return os.pidfd_open(pid)
    os.set_inheritable(pidfd, False)
    return pidfd
