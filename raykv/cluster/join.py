"""Which Ray cluster, which node, and RayKV's actors in it: find, start, stop.

The cluster is the one that is named (setting, then `RAY_ADDRESS`), else the only one that this user
runs on this host, else a new local one that outlives its creator. Never Ray's bare "auto", which
joins whatever cluster started last.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import ray

from raykv.base import deadlines, parsing, threads
from raykv.base.errors import ClusterError, ThreadError, first_line
from raykv.base.ownership import open_own
from raykv.cluster import names, processes

# For `ray start`, which takes 6 to 10 s on a quiet machine.
RAY_START_S = 90.0

GCS_PATIENCE = "RAY_gcs_rpc_server_reconnect_timeout_s"

MOST_GCS_PATIENCE_S = "2000000"
"""23 days: Ray counts it in milliseconds of 31 bits."""

logger = logging.getLogger("raykv.ray")

MAX_FOREIGN = 4
"""Clusters of other users that a warning names."""

LOOPBACK = "127.0.0.1"

ONE_CLUSTER = (
    "start Ray on all hosts of the engine first, as one cluster: `ray start --head` on one of "
    "them, `ray start --address=HOST:PORT` on the others"
)

HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""How a client of gRPC begins: with no settings of its own."""

AUTH_MODE, AUTH_TOKEN, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "token"
"""Ray's variables, and the mode in which it wants a token."""

SENDER = "raylet"
"""Who these messages are said to come from."""


@dataclass(frozen=True)
class Joined:
    """A cluster, and whether `ensure_cluster` started it."""

    address: str
    started: bool


@dataclass(frozen=True)
class Raylet:
    """A Ray node of this host. `address` is that of its GCS, `began_at` in Unix seconds.

    `is_own`: it is this user's; what others' claim to be is not believed. `pid` is its raylet's.
    """

    node_id: str
    address: str
    began_at: float
    is_own: bool = True
    pid: int = 0
    temp_dir: str | None = None


def raylets() -> list[Raylet]:
    """This user's Ray nodes of this host whose raylets run, the latest one last."""
    return [each for each in everybodys_raylets() if each.is_own]


def everybodys_raylets() -> list[Raylet]:
    """Those, and what processes of other users claim to be, the latest one last."""
    found = []
    for process, arguments in processes.every_command_line():
        if processes.is_raylet(arguments):
            with contextlib.suppress(psutil.Error):
                raylet = Raylet(
                    processes.argument(arguments, "node-id") or "",
                    processes.argument(arguments, "gcs-address") or "",
                    process.create_time(),
                    processes.is_own(process),
                    process.pid,
                    processes.argument(arguments, "temp-dir"),
                )
                found.append(raylet)
    return sorted(found, key=lambda each: each.began_at)


def successor(gone: Raylet, there: Sequence[Raylet]) -> Raylet | None:
    """Of the raylets that are there, the latest one that has begun in the place of another one."""
    nexts = [
        each
        for each in there
        if each.address == gone.address
        and each.began_at > gone.began_at
        and each.node_id != gone.node_id
    ]
    return max(nexts, key=lambda each: each.began_at, default=None)


def running_clusters() -> list[str]:
    """Addresses (host:port of the GCS) of this user's Ray clusters with a raylet on this host."""
    return sorted({each.address for each in raylets() if each.address})


def find_cluster(ray_address: str | None) -> str | None:
    """The cluster to join, or None if this user has none on this host and none was named.

    Raises:
        ClusterError: several clusters of this user run on this host and none was named.
        SettingError: what is named can't be the address of a cluster.
    """
    name = "ray_address" if ray_address else "RAY_ADDRESS"
    named = parsing.address(name, ray_address or os.environ.get(name, ""))
    if named == "local":
        return None
    if named and named != "auto":
        return named
    running = running_clusters()
    if len(running) > 1:
        raise ClusterError(
            f"{len(running)} Ray clusters run on this host: {', '.join(running)}. Name one with "
            "the setting ray_address, or with RAY_ADDRESS"
        )
    if running:
        return running[0]
    foreign = {parsing.shown(each.address) for each in everybodys_raylets() if not each.is_own}
    if foreign:
        logger.warning(
            "not joined: what other users run on this host as Ray clusters (%s). To join one, name "
            "it with the setting ray_address, or with RAY_ADDRESS",
            ", ".join(sorted(foreign)[:MAX_FOREIGN]),
        )
    return None


def ensure_cluster(ray_address: str | None) -> Joined:
    """The cluster to join; a new local one, on loopback, if there is none.

    Processes that call this at the same time agree on one cluster.

    Raises:
        ClusterError: several run and none was named, or none could be started.
    """
    with _start_lock():
        found = find_cluster(ray_address)
        if found is not None:
            return Joined(found, started=False)
        return Joined(_start_local(), started=True)


def start_lock() -> Path:
    """The file that starters of local clusters lock."""
    return Path(tempfile.gettempdir()) / f"raykv-start-{os.getuid()}.lock"


@contextmanager
def _start_lock() -> Iterator[None]:
    """One starter per user and host at a time."""
    path = start_lock()
    give_up_at = time.monotonic() + 2 * RAY_START_S
    try:
        fd = open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise ClusterError(
            f"no local Ray cluster can be looked for or started: {error.strerror}. Remove it, or "
            "set TMPDIR to a folder of your own"
        ) from error
    with os.fdopen(fd, "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise ClusterError(f"another process holds {path} and does not end") from None
                time.sleep(deadlines.LOOK_S)
        yield


def begin_ray_start(
    arguments: Sequence[str], more: Mapping[str, str], output: IO[str]
) -> subprocess.Popen[bytes]:
    """`ray start`, in a session of its own; `output` gets what it prints.

    Args:
        arguments: of the command.
        more: what its environment has more than ours.
        output: an open file.
    """
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "ray.scripts.scripts", "start"]
    return subprocess.Popen(
        [*command, "--disable-usage-stats", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env={**environment, **more},
    )


def _start_local() -> str:
    """`ray start --head` on a free port, detached from us."""
    arguments = ["--head", "--port=0", "--include-dashboard=false", f"--node-ip-address={LOOPBACK}"]
    token, before = _token_of_new_cluster(), joined_by_others()
    with tempfile.TemporaryFile("w+") as output:
        starter = begin_ray_start(arguments, token, output)
        try:
            code = starter.wait(RAY_START_S)
        except subprocess.TimeoutExpired as error:
            processes.stop_group(starter.pid)
            raise ClusterError(f"`ray start` did not end in {RAY_START_S:.0f} s") from error
        started = (each for each in raylets() if processes.group_of(each.pid) == starter.pid)
        address = next((each.address for each in started), "")
        if code or not address:
            output.seek(0)
            raise ClusterError(f"`ray start` failed: {output.read().strip()[-2000:]}")
    withdraw(address, before)
    logger.info("started a local Ray cluster at %s; `raykv down --with-ray` stops it", address)
    return address


def _token_of_new_cluster() -> dict[str, str]:
    """Environment of a new cluster: everyone who reaches Ray can run code, so it wants a token.

    The token is this user's, if there is one. Otherwise the cluster's processes have one of their
    own in their environment: a file in the user's folder would switch tokens on for all Ray
    clusters that this user starts later.
    """
    if os.environ.get(AUTH_MODE, TOKEN).lower() != TOKEN:
        return {}
    from ray._private.authentication import authentication_token_setup as setup

    if setup.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True):
        return {AUTH_MODE: TOKEN}
    return {AUTH_MODE: TOKEN, AUTH_TOKEN: secrets.token_hex(32)}


def _use_token(address: str) -> None:
    """Use the token of the cluster at `address`, or this user's; a cluster without authentication
    ignores it.

    A token that is in no file is taken from the environment of the cluster's raylet on this host.
    """
    try:
        from ray._private.authentication import authentication_token_setup as setup

        for raylet in _raylets_at(address):
            if token := psutil.Process(raylet.pid).environ().get(AUTH_TOKEN):
                os.environ.update({AUTH_MODE: TOKEN, AUTH_TOKEN: token})
                setup.Config.initialize("")
                setup.AuthenticationTokenLoader.instance().reset_cache()
                return
        # It says each time that a token is used, which is as it should be.
        logging.getLogger(setup.__name__).setLevel(logging.ERROR)
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except Exception as error:
        logger.debug("no authentication token is used: %s", error)


def joined_by_others(temp_dir: str | None = None) -> str:
    """Address of the cluster that `ray.init()` without an address joins on this host; "" if it
    starts a new one.
    """
    try:
        return _address_file(temp_dir).read_text().strip()
    except (ImportError, OSError, UnicodeDecodeError):
        return ""


def _address_file(temp_dir: str | None) -> Path:
    from ray._common.utils import get_ray_address_file

    return Path(get_ray_address_file(temp_dir))


def withdraw(address: str, before: str = "", temp_dir: str | None = None) -> None:
    """Keep other Ray programs of this host from joining the cluster at `address` by themselves.

    They join the one at `before` again, if it still runs.
    """
    if before == address or joined_by_others(temp_dir) != address:
        return
    file = _address_file(temp_dir)
    try:
        file.unlink()
        if before in {each.address for each in everybodys_raylets() if each.address}:
            # Anybody can write to the folder: nothing that is there is followed or overwritten.
            with os.fdopen(open_own(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w") as new:
                new.write(before)
    except OSError as error:
        logger.warning(
            "%s still names the Ray cluster at %s (%s): once it has ended, remove that file, or "
            "`ray.init()` waits for it",
            file,
            address,
            error.strerror,
        )


def _raylets_at(address: str) -> list[Raylet]:
    """This user's raylets of a cluster on this host."""
    return [each for each in raylets() if each.address == address]


def stop_started(address: str) -> None:
    """Stop a local cluster that `ensure_cluster` started: the processes of that session alone."""
    found = _raylets_at(address)
    for raylet in found:
        processes.stop_group(processes.group_of(raylet.pid))
    for raylet in found:
        withdraw(address, temp_dir=raylet.temp_dir)


def join(address: str) -> None:
    """Make this process a driver of the cluster; nothing if it already is part of one.

    Raises:
        ClusterError: the cluster can't be reached.
    """
    connect_only_when_told()
    if ray.is_initialized():
        return
    _use_token(address)
    check_reachable(address)
    log_errors()
    try:
        with _fresh_randomness(), _outliving_the_cluster(), _keeping_handlers():
            # bounded: Ray gives up by itself; the cluster was reachable
            ray.init(
                address=address,
                namespace=names.RAY_NAMESPACE,
                log_to_driver=False,
                logging_level=logging.WARNING,
                configure_logging=False,
            )
    except Exception as error:
        if not everybodys_raylets():
            raise ClusterError(
                f"cannot join the Ray cluster at {address}: no Ray node runs on this host. Start "
                f"one (`ray start --address={address}`), or come from a host that has one"
            ) from error
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {first_line(error)}. Is it running, and "
            "does this process have its authentication token (RAY_AUTH_TOKEN, or the token file "
            "of the user who started it)?"
        ) from error


def join_within(address: str, deadline_s: float) -> None:
    """`join` with a deadline: Ray itself waits for minutes for parts of it that hang.

    Raises:
        ClusterError: the cluster can't be reached, or a part of it does not answer.
    """
    check_reachable(address)
    check_answers(address)
    joining = threads.begun(lambda: join(address))
    try:
        try:
            joining.result(deadlines.CLIENT_S)
        except TimeoutError:
            logger.warning("joining Ray at %s takes long: it is given %.0f s", address, deadline_s)
            joining.result(deadline_s - deadlines.CLIENT_S)
    except TimeoutError as error:
        atexit.unregister(ray.shutdown)
        raise _silence(address, "cluster", deadline_s) from error
    except KeyboardInterrupt:
        atexit.unregister(ray.shutdown)
        raise


def check_answers(address: str) -> None:
    """Find what hangs: `ray.init` would keep this whole process waiting for it, Ctrl-C too.

    Raises:
        ClusterError: the gcs_server, or the raylet of this host, accepts connections and says
            nothing.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false"):
        return
    host, _, port = address.rpartition(":")
    if not _speaks(host.strip("[]"), int(port)):
        raise _silence(address, "gcs_server", deadlines.PROBE_S)
    heard = []
    for raylet in _raylets_at(address):
        with contextlib.suppress(psutil.Error):
            # At its own address: the gcs_server may be on another host.
            own = [
                each.laddr
                for each in psutil.Process(raylet.pid).net_connections("tcp")
                if each.status == psutil.CONN_LISTEN
            ]
            heard += [_speaks(each.ip, each.port) for each in own[:1]]
    if heard and not any(heard):
        raise _silence(address, "raylet of this host", deadlines.PROBE_S)


def _speaks(host: str, port: int) -> bool:
    """Whether a server of gRPC says its first word, the settings of HTTP/2."""
    try:
        with socket.create_connection((host, port), deadlines.PROBE_S) as connection:
            connection.settimeout(deadlines.PROBE_S)
            connection.sendall(HTTP2_HELLO)  # bounded: the socket's time-out
            return bool(connection.recv(1))  # bounded: the socket's time-out
    except OSError:
        return False


def _silence(address: str, who: str, deadline_s: float) -> ClusterError:
    groups = {processes.group_of(raylet.pid) for raylet in _raylets_at(address)}
    stopped = []
    for process, arguments in processes.command_lines():
        with contextlib.suppress(psutil.Error):
            if (
                processes.group_of(process.pid) in groups
                and process.status() == psutil.STATUS_STOPPED
            ):
                stopped.append(f"{Path(arguments[0]).name} (pid {process.pid}) is stopped")
    return ClusterError(
        f"the {who} of Ray at {address} does not answer within {deadline_s:g} s"
        f"{': ' if stopped else ''}{', '.join(stopped)}. If it does not come back, `raykv down "
        "--with-ray` ends what of that cluster runs on this host"
    )


def leave_ray(shutdown: Callable[[], None], deadline_s: float) -> bool:
    """Disconnect from the cluster, at most for `deadline_s`; False if it took longer.

    Ray waits long for parts of it that are dead. Then it is left as it is: Ray cleans up after this
    process once it has ended, and Ray's own clean-up at our exit, which would wait again, is
    skipped.
    """
    try:
        threads.within(deadline_s, shutdown)
    except (TimeoutError, ThreadError):
        logger.warning("Ray has not let go of this process within %.0f s", deadline_s)
        atexit.unregister(ray.shutdown)
        return False
    return True


def connect_only_when_told() -> None:
    """From now on, let nothing but `ray.init` connect this process.

    Any other call to Ray, a left-over one of a thread too, would join whatever cluster began last
    on this host, of any user.
    """
    try:
        from ray._private import auto_init_hook

        auto_init_hook.enable_auto_connect = False
    except Exception as error:
        logger.debug("Ray may connect by itself: %s", error)


def rejoin(address: str) -> None:
    """Leave the cluster, whatever is left of it, and join the one at the address: at the raylet
    that is here now.

    Handles and refs from before are worth nothing, and no other thread may call Ray meanwhile. If
    it fails this process is no driver any more, and any call to Ray fails.

    Raises:
        ClusterError: it can't be left, or can't be reached.
    """
    check_reachable(address)
    try:
        threads.within(deadlines.JOIN_S, ray.shutdown)
    except TimeoutError:
        raise ClusterError(
            f"Ray does not let go of this process in {deadlines.JOIN_S:.0f} s"
        ) from None
    join(address)


@contextmanager
def _fresh_randomness() -> Iterator[None]:
    """Python's generator differs from that of other processes; afterwards it goes on as before.

    Ray draws the id under which a driver subscribes to messages from it. vLLM seeds it, with the
    same number in all engines: drivers of one id take each other's place at the GCS for ever, which
    costs half a core there and a quarter in each of them.
    """
    before = random.getstate()
    random.seed()
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _keeping_handlers() -> Iterator[None]:
    """Keep the handler of SIGTERM: Ray's own would end the process on the spot.

    Only the main thread can set one; that Ray can't, on another one, is nothing to warn of.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    voice = logging.getLogger("ray._private.worker")
    level = voice.level
    voice.setLevel(level if is_main else logging.ERROR)
    try:
        yield
    finally:
        voice.setLevel(level)
        if callable(handler) and is_main:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def _outliving_the_cluster() -> Iterator[None]:
    """What joins Ray meanwhile goes on when the cluster's GCS is gone for longer than a minute.

    Ray would end the process then, and an engine with it. It reads this when it starts.
    """
    is_set = GCS_PATIENCE in os.environ
    os.environ.setdefault(GCS_PATIENCE, MOST_GCS_PATIENCE_S)
    try:
        yield
    finally:
        if not is_set:
            del os.environ[GCS_PATIENCE]


def check_reachable(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there.

    Raises:
        ClusterError: nobody listens at the address.
    """
    host, _, port = address.rpartition(":")
    try:
        if not port.isdigit():
            raise ValueError("it is not of the form host:port")
        socket.create_connection((host.strip("[]"), int(port)), deadlines.ANSWER_S).close()
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Ray cluster can be reached at {address!r}: {error}. Check ray_address, or "
            "RAY_ADDRESS"
        ) from error


def current_address() -> str:
    """GCS address of the cluster that this process has joined."""
    return str(ray.get_runtime_context().gcs_address)


def resolve_node_id(node_id: str) -> str:
    """`node_id`, or the node of the raylet that this process is connected to.

    Raises:
        ClusterError: there is no such node alive.
    """
    if not node_id:
        return str(ray.get_runtime_context().get_node_id())
    alive = live_nodes()
    if node_id not in alive:
        raise ClusterError(f"node_id={node_id!r} is no live node of the cluster: {sorted(alive)}")
    return node_id


def live_nodes() -> set[str]:
    """Ids of the cluster's nodes that are alive."""
    # bounded: Ray's own deadline; at the start
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def log_errors() -> None:
    """Send such messages to the log `raykv.ray` from now on; print all others as before."""
    try:
        from ray._private import worker

        plain = worker.print_to_stdstream
    except Exception as error:
        logger.debug("Ray's messages are left as they are: %s", error)
        return
    if getattr(plain, "logs_errors", False):
        return

    def print_or_log(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        if data.get("pid") == SENDER:
            for line in data.get("lines", ()):
                logger.info("Ray says: %s", line)
        else:
            plain(data, *arguments, **keywords)

    print_or_log.logs_errors = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_or_log
