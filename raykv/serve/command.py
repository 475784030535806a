"""`raykv serve`: vLLM's own OpenAI server with RayKV as its KV connector.

`plan_serve` decides what vLLM is started with and starts nothing. `run_server` runs a command in a
process group of its own, so that Ctrl-C reaches this process alone, and ends the group with it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from raykv.base import deadlines
from raykv.base.errors import ClusterError, SettingError, VersionError
from raykv.base.extras import with_extra
from raykv.base.settings import load_settings
from raykv.serve.models import find_model
from raykv.vllm import command as vllm_command
from raykv.vllm.internals.arguments import REFUSED_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from raykv.cluster.join import Joined

# For `vllm serve` to end after SIGINT: it may be writing out its last answers.
SERVE_GRACE_S = 20.0

CONNECTOR = "RayKVConnector"
CONNECTORS = (CONNECTOR, "RayKVHiddenStatesConnector")
"""Names of RayKV's connectors in vLLM."""

_EXTRA = "kv_connector_extra_config"
_TRANSFER_FLAG = "--kv-transfer-config"
_SHORTEST_TRANSFER_FLAG = "--kv-t"  # vLLM takes any abbreviation that is unambiguous
_MIDDLEWARE_FLAG = "--middleware"
_NESTING_LIMIT = "raykv.serve.http.NestingLimit"
_NAMES_FLAG = "--served-model-name"
_HOSTS_FLAG = "--nnodes"
_EAGER_FLAG = "--enforce-eager"
_DETAILS_FLAG = "--enable-prompt-tokens-details"
_REFUSED_FLAGS = {f"--{name.replace('_', '-')}": why for name, why in REFUSED_ARGUMENTS.items()}
_CPU_KV_CACHE_FLAGS = ("--kv-cache-memory-bytes", "--gpu-memory-utilization")
_CPU_KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_KV_CACHE_GIB = "1"
_INTERRUPTED = 128 + signal.SIGINT


@dataclass(frozen=True)
class ServePlan:
    """What vLLM is started with. `flags` are the user's, without any `--kv-transfer-config`.

    Requests may call the model by `names` unless the user's flags have others; if empty, they call
    it `model`.
    """

    model: str
    flags: tuple[str, ...]
    transfer: Mapping[str, Any]
    names: tuple[str, ...] = ()

    @property
    def ray_address(self) -> str | None:
        """The cluster that the user named; None when none was."""
        address: str | None = self.transfer[_EXTRA].get("ray_address")
        return address

    @property
    def has_further_hosts(self) -> bool:
        """Whether ranks of the engine are on other hosts, too."""
        parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
        in_file = _from_config_file(self.flags, _HOSTS_FLAG)
        parser.add_argument("-n", _HOSTS_FLAG, dest="num_hosts", default=in_file or 1)
        try:
            given, _ = parser.parse_known_args(self.flags)
        except argparse.ArgumentError:
            # vLLM refuses it.
            return False
        return str(given.num_hosts) != "1"

    def vllm_args(self, ray_address: str) -> list[str]:
        """Arguments of the command `vllm`, for engines that join the cluster at `ray_address`.

        Answers say how many tokens of a prompt were cached and where, unless the user's flags
        switch that off: the last one counts.
        """
        extra = {**self.transfer[_EXTRA], "ray_address": ray_address}
        transfer = json.dumps({**self.transfer, _EXTRA: extra})
        ours = [_TRANSFER_FLAG, transfer, _MIDDLEWARE_FLAG, _NESTING_LIMIT, _DETAILS_FLAG]
        if self.names:
            # The small model: compiling takes minutes, and saves seconds of a trial.
            ours = [_EAGER_FLAG, *ours]
        if self.names and _from_config_file(self.flags, _NAMES_FLAG) is None:
            ours = [_NAMES_FLAG, *self.names, *ours]
        return ["serve", self.model, *ours, *self.flags]

    def environment(self, base: Mapping[str, str], *, is_cpu_build: bool) -> dict[str, str]:
        """`base`, and on the CPU build a size of the KV cache where the user has set none."""
        env = dict(base)
        is_sized = any(_flag_name(flag) in _CPU_KV_CACHE_FLAGS for flag in self.flags)
        if is_cpu_build and not is_sized:
            env.setdefault(_CPU_KV_CACHE_VARIABLE, _CPU_KV_CACHE_GIB)
        return env


@dataclass
class StopRequests:
    """How often the user has asked to stop. Written by signal handlers only."""

    count: int = 0


def serve(
    model: str, vllm_args: list[str], *, ray_address: str | None, pool_bytes: str | None
) -> int:
    """Serve `model` until the server ends or the user stops it; return the exit status.

    Runs on the main thread: it handles SIGINT, SIGTERM and SIGHUP meanwhile. A Ray cluster that
    was started for this server ends with it; one that was there stays as it was.

    Args:
        model: Its name, see `raykv.serve.models.find_model`.
        vllm_args: Flags of `vllm serve`, passed on.
        ray_address: The cluster to join; None finds the one on this machine or starts one.
        pool_bytes: Memory that this node lends, as the setting of that name; None is its default.

    Raises:
        SettingError: The flags ask for another connector, or contradict each other, a setting is
            unknown or malformed, or there is no such model; nothing has been started then.
        ModelUnavailableError: The small model can't be made.
        VersionError: vLLM is not installed.
        ClusterError: The Ray cluster cannot be reached or started, or the engine has further hosts
            and this one has no cluster.
    """
    plan = plan_serve(model, vllm_args, ray_address=ray_address, pool_bytes=pool_bytes)
    load_settings(plan.transfer[_EXTRA])
    if not vllm_command.is_installed():
        raise VersionError(f"vLLM is not installed: {with_extra('gpu', 'cpu')}")
    from raykv.cluster.join import (
        ONE_CLUSTER,
        check_reachable,
        ensure_cluster,
        find_cluster,
        stop_started,
    )

    if plan.has_further_hosts and find_cluster(plan.ray_address) is None:
        raise ClusterError(f"there is no Ray cluster here to share with other hosts: {ONE_CLUSTER}")
    found = find_model(model, _say)
    plan = replace(plan, model=found.path, names=found.names)
    with _stop_requests() as stops:
        joined = ensure_cluster(plan.ray_address)
        check_reachable(joined.address)
        _say(_sentence(joined))
        try:
            if stops.count:
                return _INTERRUPTED
            env = plan.environment(os.environ, is_cpu_build=vllm_command.is_cpu_build())
            env[vllm_command.PARENT_VARIABLE] = str(os.getpid())
            # -P: like a console script, vLLM must not import what lies in the current folder.
            python = [sys.executable, "-P", "-m", vllm_command.__name__]
            return run_server([*python, *plan.vllm_args(joined.address)], env, stops)
        finally:
            if joined.started:
                stop_started(joined.address)


def _sentence(joined: Joined) -> str:
    """Which Ray cluster the server is in, and what becomes of it."""
    if not joined.started:
        return f"joined the Ray cluster at {joined.address}"
    return (
        f"started a Ray cluster at {joined.address}, which ends with this command, and the pool "
        "with it; run `raykv up` first to keep both"
    )


def _say(line: str) -> None:
    print(f"raykv: {line}", file=sys.stderr, flush=True)


def plan_serve(
    model: str, vllm_args: Sequence[str], *, ray_address: str | None, pool_bytes: str | None
) -> ServePlan:
    """Put RayKV's settings and the user's own `--kv-transfer-config` together.

    Raises:
        SettingError: The flags name another connector, a value is not JSON, or a setting is given
            twice with different values.
    """
    flags, theirs = _split_transfer_flags(vllm_args)
    for flag in map(_flag_name, flags):
        if (why := _REFUSED_FLAGS.get(flag)) is not None:
            raise SettingError(f"{flag} {why}")
    theirs = _merge(_transfer_from_config_file(flags), theirs)
    settings = {"ray_address": ray_address, "pool_bytes": pool_bytes}
    given = {name: value for name, value in settings.items() if value is not None}
    return ServePlan(model, tuple(flags), _transfer_config(theirs, given))


def run_server(
    command: Sequence[str],
    env: Mapping[str, str],
    stops: StopRequests,
    grace_s: float = SERVE_GRACE_S,
) -> int:
    """Run `command` until it ends; return its exit status, 128 + n if signal n killed it.

    The first stop request is passed on to it as SIGINT. After `grace_s`, or at the next request,
    its process group gets SIGTERM, then SIGKILL. Nothing of the group is left on return.
    """
    process = subprocess.Popen(command, env=dict(env), stdin=subprocess.DEVNULL, process_group=0)
    try:
        _wait_for_exit(process.pid, stops, grace_s)
    finally:
        _end_group(process.pid, min(grace_s, deadlines.LEAVE_S))
    status = process.wait()  # bounded: the process has ended, it is only reaped
    return status if status >= 0 else 128 - status


@contextmanager
def _stop_requests() -> Iterator[StopRequests]:
    """Count SIGINT, SIGTERM and SIGHUP instead of dying of them."""
    stops = StopRequests()

    def count(signum: int, frame: object) -> None:
        del signum, frame
        stops.count += 1

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, count) for signum in signals}
    try:
        yield stops
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _wait_for_exit(pid: int, stops: StopRequests, grace_s: float) -> None:
    """Return when the process `pid` has ended; it is not reaped, so its id stays taken."""
    escalation = iter(
        [(os.kill, signal.SIGINT), (os.killpg, signal.SIGTERM), (os.killpg, signal.SIGKILL)]
    )
    seen, deadline = 0, math.inf
    pidfd = os.pidfd_open(pid)
    try:
        while not select.select([pidfd], [], [], deadlines.LOOK_S)[0]:
            if stops.count == seen and time.monotonic() < deadline:
                continue
            seen = stops.count
            deadline = time.monotonic() + grace_s
            if (step := next(escalation, None)) is not None:
                send, signum = step
                send(pid, signum)
    finally:
        os.close(pidfd)


def _end_group(group: int, grace_s: float) -> None:
    """Give what the group's dead leader left behind a moment to end, then kill it.

    The leader is not reaped yet: as long as it is a zombie, no other group can have its id.
    """
    psutil.wait_procs(_members(group), timeout=grace_s)
    os.killpg(group, signal.SIGKILL)
    psutil.wait_procs(_members(group), timeout=deadlines.LEAVE_S)


def _members(group: int) -> list[psutil.Process]:
    """Living processes of the group, without its leader."""
    members = []
    for process in psutil.process_iter():
        try:
            is_member = process.pid != group and os.getpgid(process.pid) == group
            if is_member and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def _split_transfer_flags(vllm_args: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Remove every `--kv-transfer-config`, in all spellings that vLLM knows, and merge them.

    vLLM itself lets the last one win; it also takes `--kv-transfer-config.key value`.
    """
    flags: list[str] = []
    theirs: dict[str, Any] = {}
    arguments = iter(vllm_args)
    for argument in arguments:
        if not _is_transfer_flag(_flag_name(argument)):
            flags.append(argument)
            continue
        name, has_value, value = argument.partition("=")
        if not has_value and (value := next(arguments, "")) == "":
            raise SettingError(f"{name} needs a value.")
        _, *path = name.split(".")
        given = _nested(path, value) if path else _json_object(value, name)
        theirs = _merge(theirs, given)
    return flags, theirs


def _flag_name(argument: str) -> str:
    """The flag as vLLM normalises it, without value and dotted path; values give themselves."""
    if not argument.startswith("--"):
        return argument
    return argument.partition("=")[0].partition(".")[0].replace("_", "-")


def _is_transfer_flag(name: str) -> bool:
    return name.startswith(_SHORTEST_TRANSFER_FLAG) and _TRANSFER_FLAG.startswith(name)


def _nested(path: Sequence[str], value: str) -> dict[str, Any]:
    """`{"a": {"b": value}}` for the path a, b; a value that is not JSON is a string."""
    try:
        nested: Any = json.loads(value)
    except json.JSONDecodeError:
        nested = value
    for key in reversed(path):
        nested = {key: nested}
    assert isinstance(nested, dict), path
    return nested


def _json_object(value: str, source: str) -> dict[str, Any]:
    try:
        parsed = json.loads(value)
    except json.JSONDecodeError as error:
        raise SettingError(f"{source} is not JSON ({error}): {value}") from error
    if not isinstance(parsed, dict):
        raise SettingError(f"{source} must be a JSON object, not {value}")
    return parsed


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, objects in them merged too; where they differ `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        held = merged.get(key)
        if isinstance(held, dict) and isinstance(value, dict):
            merged[key] = _merge(held, value)
        else:
            merged[key] = value
    return merged


def _transfer_from_config_file(flags: Sequence[str]) -> dict[str, Any]:
    """What vLLM's `--config` file says of it."""
    value = _from_config_file(flags, _TRANSFER_FLAG)
    if value is None:
        return {}
    text = value if isinstance(value, str) else json.dumps(value)
    return _json_object(text, f"{_TRANSFER_FLAG[2:]} in the file of --config")


def _from_config_file(flags: Sequence[str], flag: str) -> Any:
    """The value of `flag` in vLLM's `--config` file, or None.

    A file that cannot be read is left for vLLM to refuse.
    """
    following = flags[flags.index("--config") + 1 :] if "--config" in flags else ()
    if not following:
        return None
    import yaml

    try:
        content = yaml.safe_load(Path(following[0]).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    entries = content.items() if isinstance(content, dict) else ()
    return next((value for key, value in entries if _flag_name(f"--{key}") == flag), None)


def _transfer_config(theirs: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's KVTransferConfig; `given` are settings from flags of `raykv serve`."""
    connector = theirs.get("kv_connector", CONNECTOR)
    if connector not in CONNECTORS:
        raise SettingError(
            f"`raykv serve` runs vLLM with {' or '.join(CONNECTORS)}, but {_TRANSFER_FLAG} names "
            f"{connector}: leave it out, or start `vllm serve` yourself."
        )
    extra = theirs.get(_EXTRA) or {}
    if not isinstance(extra, dict):
        raise SettingError(f"{_EXTRA} must be a JSON object, not {extra!r}")
    for name, value in given.items():
        if str(extra.get(name, value)) != value:
            raise SettingError(
                f"{name} is {value!r} in a flag of `raykv serve` and {extra[name]!r} in "
                f"{_TRANSFER_FLAG}: give it once."
            )
    return {"kv_connector": CONNECTOR, "kv_role": "kv_both", **theirs, _EXTRA: {**extra, **given}}
