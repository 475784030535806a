"""Logs: one handler for every process of RayKV's, and the end of what an actor has written.

Ray sends an actor's standard error to a file of its own in the session's folder `logs`.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import sys
from pathlib import Path

from raykv.base.errors import SettingError
from raykv.base.settings import LOG_LEVEL, log_level

FORM = "%(levelname)s %(asctime)s [raykv %(process)d] %(message)s"

MAX_PIECE = 64 << 10
"""Bytes of a log that are read at once."""

_RAYS_LINES = re.compile(rb"^:(?:job_id|actor_name|task_name):.*\n", re.MULTILINE)
"""By which Ray finds out whose log a file is."""


def level_for_actors() -> dict[str, str]:
    """The variable as an actor that this process makes is to have it."""
    return {LOG_LEVEL: os.environ[LOG_LEVEL]} if LOG_LEVEL in os.environ else {}


def set_up_logging(usual: str = "INFO") -> None:
    """Give RayKV's loggers a level, and a handler unless this process has one for all loggers.

    A level that does not exist is said, and the usual one counts: settings were checked before.
    """
    ours = logging.getLogger("raykv")
    problem = ""
    try:
        ours.setLevel(log_level(usual))
    except SettingError as error:
        ours.setLevel(usual)
        problem = str(error)
    if not ours.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORM, datefmt="%m-%d %H:%M:%S"))
        ours.addHandler(handler)
    if problem:
        ours.warning("%s; until then it is %s", problem, usual)


def read_log(start: int | None, fd: int = 2) -> tuple[int, bytes]:
    """What this process has written to standard error, if that is a file.

    Args:
        start: from this byte on; None: the end of it.
        fd: of standard error.

    Returns:
        Where to go on, and at most `MAX_PIECE` bytes, without the lines that Ray puts there.
    """
    facts = os.fstat(fd)
    if not stat.S_ISREG(facts.st_mode):
        return 0, b""
    place = max(0, facts.st_size - MAX_PIECE) if start is None else max(0, start)
    # A descriptor of its own: this one may be open for writing only.
    with Path(f"/proc/self/fd/{fd}").open("rb") as file:
        file.seek(min(place, facts.st_size))
        piece = file.read(MAX_PIECE)
        return file.tell(), _RAYS_LINES.sub(b"", piece)
