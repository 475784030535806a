"""Every setting of RayKV: parsed once, checked, frozen.

A setting comes from `kv_connector_extra_config`, else from the variable `RAYKV_<NAME>`, else from
its default here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from raykv.errors import SettingError
from raykv.parsing import MAX_SHOWN, count, flag, one_of, parse_size, rate, seconds, shown, text

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
        "", text, "A file for the pool, which then survives its NodeActor. Default: anonymous RAM"
    )
    ray_address: str = _setting(
        "",
        text,
        "The Ray cluster. Default: RAY_ADDRESS, else the one on this host, else a new local one",
    )
    node_id: str = _setting(
        "", text, "The Ray node of this engine. Default: that of the raylet it connects to"
    )
    weights_version: str = _setting(
        "", text, "Change it when weights are swapped in place: old KV is never seen again"
    )
    eviction_policy: str = _setting(
        "worth",
        one_of("worth", "lru", "arc", "s3fifo"),
        "Order in which chunks are given up: worth, lru, arc or s3fifo",
    )
    lease_slots: int = _setting(
        1024,
        count,
        "Most free slots that an engine holds per KV group: what it can store between two "
        "exchanges with the scheduler actor",
    )
    kv_handover: str = _setting(
        "auto",
        one_of("auto", "staged"),
        "How the NodeActor gets at the KV cache: mapped where it can be (auto, on the CPU), or "
        "copied through staging memory (staged; GPUs always)",
    )
    staging_bytes: int = _setting(
        256 << 20, parse_size, "Host memory for the staged hand-over, per rank"
    )
    load_deadline_s: float = _setting(
        5.0, seconds, "A load that takes longer is given up and the tokens are computed"
    )
    store_deadline_s: float = _setting(
        30.0, seconds, "A store that takes longer is given up; nobody waits for it"
    )
    flush_deadline_s: float = _setting(
        5.0, seconds, "Longest wait for stores from blocks that vLLM takes away (pre-emption)"
    )
    lookup_deadline_s: float = _setting(
        2.0, seconds, "Longest wait of a request for chunks that are still being stored"
    )
    query_deadline_s: float = _setting(
        1.0, seconds, "Longest wait of a request to hear what other nodes have"
    )
    fetch_deadline_s: float = _setting(
        10.0, seconds, "Longest wait of a request for chunks on their way from another node"
    )
    stop_unused_stores: bool = _setting(
        True,
        flag,
        "While less than 3 of 100 stored chunks are loaded again, only one request in 16 stores; "
        "never before the pools have been filled once, and 2,048 chunks were stored",
    )
    fetch_checksums: bool = _setting(
        True, flag, "Check every chunk that comes from another node (XXH3)"
    )
    fetch_bytes_per_s: float | None = _setting(
        None, rate, "Speed of a fetch when it is compared with computing. Default: measured"
    )
    prefill_tokens_per_s: float | None = _setting(
        None, rate, "Speed of computing when it is compared with a fetch. Default: measured"
    )
    cancel_grace_s: float = _setting(
        2.0,
        seconds,
        "Time for the NodeActor to confirm that it gave up a copy; then it is ended, since a late "
        "copy could write into another request's blocks",
    )
    attach_deadline_s: float = _setting(
        60.0, seconds, "Longest wait at start for the actors; then the engine runs without them"
    )
    rpc_deadline_s: float = _setting(
        5.0, seconds, "Longest wait for one answer of an actor, in background threads only"
    )
    heartbeat_s: float = _setting(
        1.0, seconds, "Pause between exchanges with the scheduler actor when there is no news"
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
        if not isinstance(key, str):
            raise SettingError(f"a setting of RayKV has the name {shown(key)}, which is no text")
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
    close = difflib.get_close_matches(name[:MAX_SHOWN], allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(sorted(allowed))}"
    return f"unknown {what} {shown(name)} of RayKV: {hint}"


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


# Waits that are no settings. Together with the settings whose names end in `_deadline_s`, and
# `cancel_grace_s`, these are all the times that anything in RayKV waits for anything:
# tests/unit/test_deadlines.py finds waits without one, and numbers that should be here.

# The worker's line to its NodeActor

LINK_CONNECT_S = 5.0
"""For connecting and attaching: mapping a KV cache takes milliseconds, prefaulting may delay it."""

LINK_PAUSES_S = (0.05, 2.0)
"""Between attempts to reach the NodeActor, first and longest: Ray needs a second to start another
one; an attempt costs microseconds."""

LINK_LOOK_S = 1.0
"""The line's thread looks around at least so often, should nothing wake it."""

LINK_WAIT_LOOK_S = 0.5
"""An engine that waits for jobs looks so often whether the line's thread still lives."""

LINK_EXIT_LOOK_S = 5.0
"""How often a NodeActor that was killed but has not exited yet is complained about."""

GCS_S = 5.0
"""For an actor's address from Ray's head node, which takes milliseconds; Ray itself waits for a
minute for a GCS that is gone."""

LINK_CLOSE_S = 5.0
"""For the line's thread at the engine's end; it gives up whatever it waits for at once."""

# The NodeActor

NODE_HELLO_S = 10.0
"""From a connection's start to the end of its attach message: strangers may say nothing. The
message is sent at once; a frozen engine may attach anew when it wakes up."""

NODE_SEND_S = 2.0
"""A worker that does not read its results for so long is stuck; its connection is closed, so that
it does not hold up the copies of others."""

NODE_COPY_WAIT_S = 10.0
"""How long a store waits for the readers of its slot: loads take milliseconds, and other nodes
copy what they read first."""

NODE_STORE_EXPIRY_S = 30.0
"""How long a chunk waits for the parts of the other ranks, as long as a store may take."""

NODE_LOOK_S = 1.0
"""The copy thread looks so often for stores that have expired. Who waits for a copy to end looks so
often whether it has; that it ends is sure, since every run of bytes is short."""

NODE_DEATHS_LOOK_S = 1.0
"""The thread that waits for the death of engines looks so often whether it should end."""

NODE_STOP_S = 2.0
"""For each thread at the end; a copy that runs is given up before its next run of bytes."""

NODE_ACCEPT_PAUSE_S = 0.2
"""After a connection could not be taken: there are too many open files now."""

NODE_BIND_S = 10.0
"""How long a new life waits for the last one to let go of the socket's name: a killed process with
much memory takes seconds to go."""

NODE_BIND_LOOK_S = 0.1
"""Between two tries of that."""

SLOT_LOOK_S = 0.05
"""While a store waits for a slot's readers: how often it looks whether it was cancelled."""

NODE_HEARTBEAT_S = 1.0
"""The scheduler actor forgets a node after five missed ones."""

NODE_REPORT_S = 2.0
"""For one report, which is answered in milliseconds. A report to a scheduler actor that has just
died may wait in vain; the next one finds its successor."""

NODE_REPORT_PAUSES_S = (0.2, 1.0)
"""After reports without an answer, first and longest: a new scheduler actor knows nothing until
its nodes have reported."""

NODE_BATCH_PAUSE_S = 0.002
"""New chunks are collected for so long before they are reported."""

NODE_ROOM_GRACE_S = 3.0
"""How long a new life waits for the memory of the last one to come back."""

NODE_ROOM_GRACE_LOOK_S = 0.5
"""Between two looks at it."""

NODE_ROOM_LOOK_S = 5.0
"""Between two looks of a NodeActor without a pool, or of one that memory is short for, at whether
there is room now."""

# Fetches

FETCH_MOST_S = 3600.0
"""Whatever a request says; as much as a setting allows."""

FETCH_GRACE_S = 2.0
"""Above the deadline that the NodeActor keeps, before it counts as lost."""

FETCH_LOOK_S = 0.2
"""Between two looks for requests that are overdue."""

FETCH_SLOT_WAIT_S = 1.0
"""A leased slot has no readers, save those of what it held before."""

SOURCE_PAUSES_S = (2.0, 30.0)
"""A source that did not answer is not asked for so long, first and longest: asking in vain costs a
request its fetch deadline, Ray takes 12 to 64 s to find that a node is gone."""

FETCHER_PAUSES_S = (0.1, 2.0)
"""The same for an engine's own NodeActor: Ray starts another one within seconds."""

# The engine's exchange with the scheduler actor

SCHEDULER_PAUSES_S = (0.1, 2.0)
"""After an exchange without an answer, first and longest: a new scheduler actor is there within
seconds, and nobody waits for it but new requests."""

ATTACH_PAUSE_S = 0.05
"""Between two tries to attach at the start."""

EXCHANGE_PAUSE_S = 0.002
"""Between two exchanges under load: news of some steps travel together."""

REPEAT_PAUSE_S = 0.02
"""Between two questions about chunks that are being stored elsewhere."""

WANT_PAUSE_S = 0.05
"""Between two requests for leases when the last one was not granted."""

SESSION_STOP_S = 2.0
"""For the session's thread at the engine's end; it may be waiting for an answer of Ray."""

LEAVE_S = 5.0
"""For leaving the Ray cluster at the engine's end: Ray itself waits for a dead GCS for a minute."""

ATTACH_SAY_S = 4.0
"""An engine that waits longer for the actors says so; new ones take 2 s."""

LEAST_ATTACH_S = 1.0
"""What is left of the attach deadline for a step when the steps before it have used it up."""

# Clusters, actors, and who looks at them

DOCTOR_S = 5.0
"""For each round of the doctor's questions; they are asked all at once."""

DOCTOR_GCS_S = 10.0
"""For what the doctor asks Ray itself."""

DOCTOR_REACH_S = 1.0
"""For one port."""

DOCTOR_TAKE_S = 1.0
"""For taking an answer that is there."""

RAY_START_S = 90.0
"""For `ray start`, which takes 6 to 10 s on a quiet machine."""

RAY_CONNECT_S = 5.0
"""For reaching a cluster's port at all. Joining takes 0.1 to 0.6 s when all is well; without the
cluster's authentication token Ray itself gives up after about 20 s."""

RAY_STOP_S = 3.0
"""For processes to end by themselves, then once more after SIGKILL."""

RAY_LOOK_S = 0.1
"""Between two looks for another process, a new node, or actors that are to go."""

REPLACE_PAUSE_S = 0.5
"""For Ray to forget the name of an actor that was ended."""

CLIENT_S = 10.0
"""For one answer of an actor to a person or a program, who may have come during a restart."""

CHUNK_READ_S = 30.0
"""For chunks of at most 64 MiB that a person looks at: from another node at 3 MB/s, or behind four
fetches that run there."""

RECORD_PAUSE_S = 0.5
"""Between two looks of a recorder at the cluster: events and requests are kept for far longer."""

RECORDER_STOP_S = 15.0
"""For a recorder's thread, which may be waiting for one answer."""

READER_S = 5.0
"""For one page of events or of a snapshot."""

READER_PATIENCE_S = 30.0
"""A scheduler actor that restarts is asked again for so long by a reader of events."""

READER_PAUSE_S = 0.2
"""Between two questions of a reader when nothing is new, or nobody answers."""

SERVE_GRACE_S = 20.0
"""For `vllm serve` to end after SIGINT: it may be writing out its last answers."""

SERVE_LEFTOVER_S = 5.0
"""For processes that a dead server has left behind, before and after SIGKILL."""

SERVE_LOOK_S = 0.2
"""How often `raykv serve` looks whether it was asked to stop."""
