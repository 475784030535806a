"""Ray's processes on this host: found by their command lines, ended with what they have started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from raykv.base import deadlines


def stop_group(group: int) -> None:
    """End Ray's processes in a process group, and what they have started.

    Ray's helpers carry its package in their command line; whatever else shares the group stays.
    """
    members = [
        process
        for process, arguments in command_lines()
        if group_of(process.pid) == group and _is_ray(arguments)
    ]
    everyone = {process.pid: process for process in members}
    for process in members:
        everyone |= {child.pid: child for child in _children(process)}
    for process in everyone.values():
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(list(everyone.values()), timeout=deadlines.LEAVE_S)
    for process in alive:
        _quietly(process.kill)
    psutil.wait_procs(alive, timeout=deadlines.LEAVE_S)


def group_of(pid: int) -> int:
    """A process's group; -1: it has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _is_ray(arguments: list[str]) -> bool:
    """Whether a command line is that of one of Ray's own processes."""
    return any("/ray/" in argument or "ray.scripts" in argument for argument in arguments)


def command_lines() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Every process of this user on this host.

    Other users may give theirs any name and arguments: what these say is not believed.
    """
    return (each for each in every_command_line() if is_own(each[0]))


def every_command_line() -> Iterator[tuple[psutil.Process, list[str]]]:
    """Every process on this host, of any user, whose command line can be read."""
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"]
        if arguments:
            yield process, arguments


def is_own(process: psutil.Process) -> bool:
    """Whether a process has no user but this one: who starts a program that changes its user
    chooses its arguments.
    """
    try:
        return set(process.uids()) == {os.getuid()}
    except psutil.Error:
        return False


def is_raylet(arguments: list[str]) -> bool:
    """Whether a command line is that of a raylet."""
    return Path(arguments[0]).name == "raylet"


def argument(arguments: list[str], wanted: str) -> str | None:
    """Value of `--wanted=value` or `--wanted_with_underscores=value` on a command line."""
    for each in arguments:
        name, _, value = each.partition("=")
        if name.startswith("--") and name[2:].replace("_", "-") == wanted:
            return value
    return None


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _quietly(action: Any) -> None:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        action()


def end_children() -> None:
    """Kill whatever this process has started, and what that has started."""
    for child in _children(psutil.Process()):
        _quietly(child.kill)
