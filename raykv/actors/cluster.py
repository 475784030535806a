"""Which Ray cluster, which node, and RayKV's actors in it: find, start, stop.

The cluster is the one that is named (setting, then `RAY_ADDRESS`), else the only one that runs on
this host, else a new local one that outlives its creator. Never Ray's bare "auto", which joins
whatever cluster started last.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raykv.actors import names
from raykv.actors.node import CONCURRENCY, NodeActor
from raykv.actors.scheduler import SchedulerActor
from raykv.errors import ClusterError, VersionError
from raykv.messages import PROTOCOL_VERSION, ClusterStatus, NodeDescription, decode

logger = logging.getLogger("raykv.cluster")

START_DEADLINE_S = 90.0
"""For `ray start`, which takes 6 to 10 s on a quiet machine."""

CONNECT_DEADLINE_S = 5.0
"""For reaching a cluster's port at all. Joining takes 0.1 to 0.6 s when all is well; without the
cluster's authentication token Ray itself gives up after about 20 s."""

STOP_DEADLINE_S = 3.0
"""For processes to end by themselves, then once more after SIGKILL."""

LOCK_POLL_S = 0.1

HEAD_RESOURCE = "node:__internal_head__"
"""What Ray gives the head node alone, 1.0 of it."""

SHARE_OF_HEAD = 0.001


@dataclass(frozen=True)
class Joined:
    """A cluster, and whether `ensure_cluster` started it."""

    address: str
    started: bool


def running_clusters() -> list[str]:
    """Addresses (host:port of the GCS) of the Ray clusters with a raylet on this host."""
    found = {
        _argument(arguments, "gcs-address")
        for _, arguments in _command_lines()
        if _is_raylet(arguments)
    }
    return sorted(address for address in found if address)


def find_cluster(ray_address: str | None) -> str | None:
    """The cluster to join, or None if there is none on this host and none was named.

    Raises:
        ClusterError: several clusters run on this host and none was named.
    """
    named = ray_address or os.environ.get("RAY_ADDRESS")
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
    return running[0] if running else None


def ensure_cluster(ray_address: str | None) -> Joined:
    """The cluster to join; a new local one if there is none.

    Processes that call this at the same time agree on one cluster.

    Raises:
        ClusterError: several run and none was named, or none could be started.
    """
    with _start_lock():
        found = find_cluster(ray_address)
        if found is not None:
            return Joined(found, started=False)
        return Joined(_start_local(), started=True)


@contextmanager
def _start_lock() -> Iterator[None]:
    """One starter per user and host at a time."""
    path = Path(tempfile.gettempdir()) / f"raykv-start-{os.getuid()}.lock"
    give_up_at = time.monotonic() + 2 * START_DEADLINE_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up_at:
                    raise ClusterError(f"another process holds {path} and does not end") from None
                time.sleep(LOCK_POLL_S)
        yield


def _start_local() -> str:
    """`ray start --head` on a free port, detached from us."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
    command += ["--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    _make_token()
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    # Whoever reaches Ray runs code: without a token that would be the whole network.
    environment.setdefault("RAY_AUTH_MODE", "token")
    with tempfile.TemporaryFile("w+") as output:
        starter = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            code = starter.wait(START_DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            stop_group(starter.pid)
            raise ClusterError(f"`ray start` did not end in {START_DEADLINE_S:.0f} s") from error
        address = _address_of_group(starter.pid)
        if code or address is None:
            output.seek(0)
            raise ClusterError(f"`ray start` failed: {output.read().strip()[-2000:]}")
    logger.info("started a local Ray cluster at %s; `raykv down --with-ray` stops it", address)
    return address


def _address_of_group(group: int) -> str | None:
    """GCS address of the cluster whose processes `ray start` left in its process group."""
    for process, arguments in _command_lines():
        if _is_raylet(arguments) and _group_of(process) == group:
            return _argument(arguments, "gcs-address")
    return None


def _make_token() -> None:
    """Have Ray's authentication token in the user's folder, unless this user does without."""
    command = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"]
    with contextlib.suppress(subprocess.SubprocessError):
        subprocess.run(command, capture_output=True, timeout=START_DEADLINE_S, check=False)


def _use_token() -> None:
    """Use this user's token, if there is one; a cluster without authentication ignores it."""
    try:
        from ray._private.authentication import authentication_token_setup as setup

        # It says each time that a token is used, which is as it should be.
        logging.getLogger(setup.__name__).setLevel(logging.ERROR)
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    except Exception as error:
        logger.debug("no authentication token is used: %s", error)


def stop_started(address: str) -> None:
    """Stop a local cluster that `ensure_cluster` started: the processes of that session alone."""
    raylets = [
        process
        for process, arguments in _command_lines()
        if _is_raylet(arguments) and _argument(arguments, "gcs-address") == address
    ]
    for raylet in raylets:
        stop_group(_group_of(raylet))


def stop_group(group: int) -> None:
    """End Ray's processes in a process group, and what they have started.

    Ray's helpers carry its package in their command line; whatever else shares the group stays.
    """
    members = [
        process
        for process, arguments in _command_lines()
        if _group_of(process) == group and _is_ray(arguments)
    ]
    everyone = {process.pid: process for process in members}
    for process in members:
        everyone |= {child.pid: child for child in _children(process)}
    for process in everyone.values():
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(list(everyone.values()), timeout=STOP_DEADLINE_S)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=STOP_DEADLINE_S)


def _group_of(process: psutil.Process) -> int:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return -1


def _is_ray(arguments: list[str]) -> bool:
    """Whether a command line is that of one of Ray's own processes."""
    return any("/ray/" in argument or "ray.scripts" in argument for argument in arguments)


def _command_lines() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Every process of this host whose command line can be read."""
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"]
        if arguments:
            yield process, arguments


def _is_raylet(arguments: list[str]) -> bool:
    return Path(arguments[0]).name == "raylet"


def _argument(arguments: list[str], wanted: str) -> str | None:
    """Value of `--wanted=value` or `--wanted_with_underscores=value` on a command line."""
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-") == wanted:
            return value
    return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _quietly(action: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        action()


def join(address: str) -> None:
    """Make this process a driver of the cluster; nothing if it already is part of one.

    Raises:
        ClusterError: the cluster can't be reached.
    """
    if ray.is_initialized():
        return
    _use_token()
    check_reachable(address)
    try:
        ray.init(
            address=address,
            namespace=names.RAY_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.WARNING,
            configure_logging=False,
        )
    except Exception as error:
        raise ClusterError(
            f"cannot join the Ray cluster at {address}: {_first_line(error)}. Is it running, and "
            "does this process have its authentication token (RAY_AUTH_TOKEN, or the token file "
            "of the user who started it)?"
        ) from error


def check_reachable(address: str) -> None:
    """Ray itself tries for minutes to reach a cluster that is not there.

    Raises:
        ClusterError: nobody listens at the address.
    """
    host, _, port = address.rpartition(":")
    try:
        if not port.isdigit():
            raise ValueError("it is not of the form host:port")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_DEADLINE_S).close()
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
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    if node_id not in alive:
        raise ClusterError(f"node_id={node_id!r} is no live node of the cluster: {sorted(alive)}")
    return node_id


def scheduler_actor(address: str, eviction_policy: str) -> Any:
    """The scheduler actor, created if there is none; creators that race get the same one.

    It lives on Ray's head node, without which there is no cluster, and on its successor: the loss
    of any other node does not cost the directory.
    """
    options = {
        "name": names.SCHEDULER,
        "namespace": names.RAY_NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        # An actor that needs nothing goes to any node, whatever affinity it has.
        "resources": {HEAD_RESOURCE: SHARE_OF_HEAD},
        "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
    }
    return ray.remote(SchedulerActor).options(**options).remote(address, eviction_policy)


def find_scheduler_actor() -> Any | None:
    """The scheduler actor, if there is one."""
    try:
        return ray.get_actor(names.SCHEDULER, namespace=names.RAY_NAMESPACE)
    except ValueError:
        return None


def node_actor(address: str, node_id: str, pool_bytes: int, slab_bytes: int, pool_path: str) -> Any:
    """The NodeActor of a node, created there if there is none."""
    options = {
        "name": names.node_actor(node_id),
        "namespace": names.RAY_NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
        "runtime_env": {"env_vars": {"RAY_worker_niceness": "0"}},
    }
    socket_name = names.node_socket(address, node_id)
    return (
        ray.remote(concurrency_groups=CONCURRENCY)(NodeActor)
        .options(**options)
        .remote(node_id, socket_name, pool_bytes, slab_bytes, pool_path)
    )


def find_node_actor(node_id: str) -> Any | None:
    """The NodeActor of a node, if there is one."""
    try:
        return ray.get_actor(names.node_actor(node_id), namespace=names.RAY_NAMESPACE)
    except ValueError:
        return None


def end_node_actor(node_id: str) -> None:
    """End a node's NodeActor, if there is one: else it waits for a node that is gone."""
    actor = find_node_actor(node_id)
    if actor is not None:
        ray.kill(actor, no_restart=True)


def describe(actor: Any, timeout_s: float) -> NodeDescription:
    """Ask a NodeActor what it is.

    Raises:
        ClusterError: it does not answer in time, or has died.
        VersionError: it is of another RayKV; if it has no engines it was ended, and the next call
            to `node_actor` makes one of ours.
    """
    try:
        description = decode(ray.get(actor.describe.remote(), timeout=timeout_s), NodeDescription)
    except Exception as error:
        raise ClusterError(f"the NodeActor does not answer: {_first_line(error)}") from error
    if description.version == PROTOCOL_VERSION:
        return description
    what = (
        f"the NodeActor runs RayKV {description.raykv_version} (protocol {description.version}), "
        f"this process speaks protocol {PROTOCOL_VERSION}"
    )
    if description.num_workers:
        raise VersionError(f"{what}; engines use it, so it stays: this one runs without the cache")
    ray.kill(actor, no_restart=True)
    raise VersionError(f"{what}; nobody uses it, so it is replaced", is_mended=True)


def status(scheduler: Any, timeout_s: float) -> ClusterStatus:
    """What the scheduler actor knows.

    Raises:
        ClusterError: it does not answer in time.
    """
    try:
        return decode(ray.get(scheduler.status.remote(), timeout=timeout_s), ClusterStatus)
    except Exception as error:
        raise ClusterError(f"the scheduler actor does not answer: {_first_line(error)}") from error


def stop_actors(timeout_s: float) -> int:
    """End all of RayKV's actors in the cluster; returns how many there were."""
    found = ray.util.list_named_actors(all_namespaces=True)
    ours = [entry["name"] for entry in found if entry["namespace"] == names.RAY_NAMESPACE]
    for name in ours:
        try:
            ray.kill(ray.get_actor(name, namespace=names.RAY_NAMESPACE), no_restart=True)
        except ValueError:
            logger.debug("%s has ended by itself", name)
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        left = ray.util.list_named_actors(all_namespaces=True)
        if not any(entry["namespace"] == names.RAY_NAMESPACE for entry in left):
            break
        time.sleep(LOCK_POLL_S)
    return len(ours)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
