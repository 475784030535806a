"""Every setting of RayKV: parsed once, checked, frozen.

A setting comes from `kv_connector_extra_config`, else from the variable `RAYKV_<NAME>`, else from
its default here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from raykv.errors import SettingError

VLLM_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "offload_prompt_only",
        "self_describing_kv_events",
        "spec_name",
        "spec_module_path",
    }
)
"""Keys of `kv_connector_extra_config` that keep vLLM's meaning; RayKV passes them on."""

ENV_PREFIX = "RAYKV_"

OTHER_VARIABLES = frozenset({"RAYKV_LOG_LEVEL"})
"""Variables with our prefix that are not settings of an engine."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
}


def parse_size(name: str, value: Any) -> int:
    """Bytes out of a number or a text like "8GiB", "512 MB", "1.5g" (g is GiB).

    Raises:
        SettingError: it is not a positive size.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
    if match and match[2].lower() in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2].lower()])
        if size > 0 and not isinstance(value, bool):
            return size
    raise SettingError(
        f"{name}={value!r} is not a size: give a number of bytes or a text like '8GiB' or '512MB'"
    )


def _text(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    raise SettingError(f"{name}={value!r} must be a text")


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    found = words.get(str(value).lower())
    if found is None:
        raise SettingError(f"{name}={value!r} must be true or false")
    return found


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if isinstance(value, bool) or not 0 < seconds <= 3600:
        raise SettingError(f"{name}={value!r} must be a number of seconds above 0, at most 3600")
    return seconds


def _rate(name: str, value: Any) -> float:
    try:
        rate = float(value)
    except (TypeError, ValueError):
        rate = -1.0
    if isinstance(value, bool) or not 0 < rate < float("inf"):
        raise SettingError(f"{name}={value!r} must be a number above 0")
    return rate


def _count(name: str, value: Any) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if isinstance(value, bool) or count < 1:
        raise SettingError(f"{name}={value!r} must be a whole number of at least 1")
    return count


def _one_of(*allowed: str) -> Callable[[str, Any], str]:
    def parse(name: str, value: Any) -> str:
        if value in allowed:
            return str(value)
        raise SettingError(f"{name}={value!r} is not allowed: choose one of {', '.join(allowed)}")

    return parse


def _setting(default: Any, parse: Callable[[str, Any], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "text": text})


@dataclass(frozen=True)
class Settings:
    """All settings of an engine; the README's table is made of the texts here."""

    pool_bytes: int | None = _setting(
        None,
        parse_size,
        "RAM that this node lends. Default: a quarter of what machine or control group have free",
    )
    pool_path: str = _setting(
        "", _text, "A file for the pool, which then survives its NodeActor. Default: anonymous RAM"
    )
    ray_address: str = _setting(
        "",
        _text,
        "The Ray cluster. Default: RAY_ADDRESS, else the one on this host, else a new local one",
    )
    node_id: str = _setting(
        "", _text, "The Ray node of this engine. Default: that of the raylet it connects to"
    )
    weights_version: str = _setting(
        "", _text, "Change it when weights are swapped in place: old KV is never seen again"
    )
    eviction_policy: str = _setting(
        "worth",
        _one_of("worth", "lru", "arc", "s3fifo"),
        "Order in which chunks are given up: worth, lru, arc or s3fifo",
    )
    lease_slots: int = _setting(
        1024,
        _count,
        "Most free slots that an engine holds per KV group: what it can store between two "
        "exchanges with the scheduler actor",
    )
    kv_handover: str = _setting(
        "auto",
        _one_of("auto", "staged"),
        "How the NodeActor gets at the KV cache: mapped where it can be (auto, on the CPU), or "
        "copied through staging memory (staged; GPUs always)",
    )
    staging_bytes: int = _setting(
        256 << 20, parse_size, "Host memory for the staged hand-over, per rank"
    )
    load_deadline_s: float = _setting(
        5.0, _seconds, "A load that takes longer is given up and the tokens are computed"
    )
    store_deadline_s: float = _setting(
        30.0, _seconds, "A store that takes longer is given up; nobody waits for it"
    )
    flush_deadline_s: float = _setting(
        5.0, _seconds, "Longest wait for stores from blocks that vLLM takes away (pre-emption)"
    )
    lookup_deadline_s: float = _setting(
        2.0, _seconds, "Longest wait of a request for chunks that are still being stored"
    )
    query_deadline_s: float = _setting(
        1.0, _seconds, "Longest wait of a request to hear what other nodes have"
    )
    fetch_deadline_s: float = _setting(
        10.0, _seconds, "Longest wait of a request for chunks on their way from another node"
    )
    stop_unused_stores: bool = _setting(
        True,
        _flag,
        "While less than 3 of 100 stored chunks are loaded again, only one request in 16 stores; "
        "never before the pools have been filled once, and 2,048 chunks were stored",
    )
    fetch_checksums: bool = _setting(
        True, _flag, "Check every chunk that comes from another node (XXH3)"
    )
    fetch_bytes_per_s: float | None = _setting(
        None, _rate, "Speed of a fetch when it is compared with computing. Default: measured"
    )
    prefill_tokens_per_s: float | None = _setting(
        None, _rate, "Speed of computing when it is compared with a fetch. Default: measured"
    )
    cancel_grace_s: float = _setting(
        2.0,
        _seconds,
        "Time for the NodeActor to confirm that it gave up a copy; then it is ended, since a late "
        "copy could write into another request's blocks",
    )
    attach_deadline_s: float = _setting(
        60.0, _seconds, "Longest wait at start for the actors; then the engine runs without them"
    )
    rpc_deadline_s: float = _setting(
        5.0, _seconds, "Longest wait for one answer of an actor, in background threads only"
    )
    heartbeat_s: float = _setting(
        1.0, _seconds, "Pause between exchanges with the scheduler actor when there is no news"
    )


def load_settings(
    extra_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read all settings.

    Raises:
        SettingError: a key is unknown, or a value is not allowed; the text names both.
    """
    known = {f.name: f for f in fields(Settings)}
    for key in extra_config:
        if key not in known and key not in VLLM_KEYS:
            raise SettingError(_unknown("setting", key, {*known, *VLLM_KEYS}))
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in known:
            names = {ENV_PREFIX + n.upper() for n in known}
            raise SettingError(_unknown("environment variable", variable, names))
        values[name] = known[name].metadata["parse"](variable, value)
    for key, value in extra_config.items():
        if key in known:
            values[key] = known[key].metadata["parse"](key, value)
    return Settings(**values)


def _unknown(what: str, name: str, allowed: set[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(sorted(allowed))}"
    return f"unknown {what} {name!r} of RayKV: {hint}"


def check_pool_bytes(pool_bytes: int, chunk_bytes: int, free_bytes: int, limit: str) -> None:
    """Refuse a pool that cannot be.

    Args:
        pool_bytes: size asked for.
        chunk_bytes: largest slot of the model that is served.
        free_bytes: what can still be had.
        limit: names what limits `free_bytes`.

    Raises:
        SettingError: with the size and what is allowed.
    """
    if pool_bytes < chunk_bytes:
        raise SettingError(
            f"pool_bytes={pool_bytes} is smaller than one chunk of this model ({chunk_bytes} "
            f"bytes): set pool_bytes to at least {chunk_bytes}"
        )
    if pool_bytes > free_bytes:
        raise SettingError(
            f"pool_bytes={pool_bytes} is more than {limit} can give: at most {free_bytes} bytes "
            "are free"
        )


def default_pool_bytes(free_bytes: int) -> int:
    """A quarter of the memory that is free."""
    return free_bytes // 4
