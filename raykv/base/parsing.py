"""What a setting may look like: each function gives the value, or says in a sentence why not."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable
from typing import Any

from raykv.base.errors import SettingError

UNITS = {"": 1, "b": 1}
for power, prefix in enumerate("kmgt", 1):
    UNITS[f"{prefix}b"] = 1000**power
    UNITS |= dict.fromkeys((prefix, f"{prefix}i", f"{prefix}ib"), 1024**power)

MAX_SIZE = 1 << 60
MAX_COUNT = 1 << 30
"""More than any machine has."""

MAX_SHARE = 0.75
"""Share of a pool: the rest is for everybody."""

MAX_SHOWN = 200
"""Characters of a wrong value that are repeated to the user."""


def shown(value: Any) -> str:
    """A wrong value in a message; some can't be written, or not within reason."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        # An int of thousands of digits, or lists nested as deep.
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def words(value: Any) -> str:
    """The text of a number, a text or a flag; empty for a truth value or anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return ""
    try:
        return str(value)
    except ValueError:
        return ""


def number(value: Any) -> float:
    """A number, or a text that is one; -1.0 for anything else."""
    try:
        return float(words(value))
    except ValueError:
        return -1.0


def parse_size(name: str, value: Any) -> int:
    """Bytes out of a number or a text like "8GiB", "8Gi", "512 MB", "1.5g" (g is GiB).

    Raises:
        SettingError: it is not a positive size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_SIZE:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", words(value), re.ASCII)
    if match and match[2].lower() in UNITS:
        size = float(match[1]) * UNITS[match[2].lower()]
        if 1 <= size <= MAX_SIZE:
            return int(size)
    raise SettingError(
        f"{name}={shown(value)} is not a size: give a number of bytes or a text like '8GiB' or "
        "'512MB'"
    )


def text(name: str, value: Any) -> str:
    if isinstance(value, str) and (value.isprintable() or not value):
        return value
    raise SettingError(f"{name}={shown(value)} must be a text of printable characters")


def address(name: str, value: Any) -> str:
    """Where a Ray cluster's GCS is, "auto" or "local"; an empty text is nowhere."""
    given = text(name, value)
    if given.startswith(("http://", "https://")):
        raise SettingError(
            f"{name}={shown(value)} is the address of Ray's dashboard: give host:port of the "
            "cluster's GCS, like 10.0.0.1:6379"
        )
    if given.startswith("ray://"):
        raise SettingError(
            f"{name}={shown(value)} is an address for Ray Client, which RayKV can't use: go to a "
            "host of the cluster, and give host:port of its GCS, like 10.0.0.1:6379"
        )
    if given in ("", "auto", "local") or re.fullmatch(r"\S+:[0-9]{1,5}", given):
        return given
    raise SettingError(
        f"{name}={shown(value)} is not the address of a Ray cluster: give host:port of its GCS, "
        "like 10.0.0.1:6379"
    )


def flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    meanings = {"1": True, "true": True, "yes": True, "on": True}
    meanings |= {"0": False, "false": False, "no": False, "off": False}
    found = meanings.get(words(value).lower())
    if found is None:
        raise SettingError(f"{name}={shown(value)} must be true or false")
    return found


def _within(is_allowed: Callable[[float], bool], what: str) -> Callable[[str, Any], float]:
    def parse(name: str, value: Any) -> float:
        found = number(value)
        if not is_allowed(found):
            raise SettingError(f"{name}={shown(value)} must be {what}")
        return found

    return parse


seconds = _within(lambda found: 0 < found <= 3600, "a number of seconds above 0, at most 3600")
ratio = _within(lambda found: 0 <= found < math.inf, "a number, 0 or above")
share = _within(lambda found: 0 <= found <= MAX_SHARE, f"a number from 0 to {MAX_SHARE}")


def count(name: str, value: Any) -> int:
    try:
        count = int(words(value))
    except ValueError:
        count = 0
    if not 1 <= count <= MAX_COUNT:
        raise SettingError(
            f"{name}={shown(value)} must be a whole number of at least 1, at most {MAX_COUNT}"
        )
    return count


def port(name: str, value: Any) -> str:
    """A port's number as text, "auto" or "off"."""
    found = words(value).lower()
    if found in ("auto", "off"):
        return found
    if found.isdecimal() and 0 < int(found[:6]) < 1 << 16:
        return str(int(found[:6]))
    raise SettingError(
        f"{name}={shown(value)} is not a port: give a number from 1 to 65535, auto or off"
    )


def one_of(*allowed: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        if isinstance(value, str) and value in allowed:
            return value
        raise SettingError(
            f"{name}={shown(value)} is not allowed: choose one of {', '.join(allowed)}"
        )

    return parse


def endpoint(name: str, value: Any) -> str:
    """Where a ZMQ socket is; an empty text is nowhere."""
    if isinstance(value, str) and (not value or re.fullmatch(r"(tcp|ipc)://[!-~]+", value)):
        return value
    raise SettingError(
        f"{name}={shown(value)} is not an address of a ZMQ socket: give one like 'tcp://*:5557' or "
        "'ipc:///tmp/events'"
    )


TOPIC_FIELDS = ("node", "ip", "host", "model", "namespace")


def topic(name: str, value: Any) -> str:
    """A topic in which fields stand for a chunk's node and model."""
    try:
        parts = list(string.Formatter().parse(text(name, value)))
    except ValueError:
        parts = [("", "?", "", None)]
    fields = [(field, more or how) for _, field, more, how in parts if field is not None]
    if any(field not in TOPIC_FIELDS or more for field, more in fields):
        raise SettingError(
            f"{name}={shown(value)} is not a topic: it may name "
            f"{', '.join(f'{{{field}}}' for field in TOPIC_FIELDS)}, and nothing else in braces"
        )
    return str(value)
