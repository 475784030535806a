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

from raykv.base import errors, parsing

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

_REQUEST, _STEP = "request_deadline_s bounds it", "step_deadline_s bounds it"
_MEASURED = "it is measured; always_fetch=true fetches in any case"
_PUBLISHED = "`raykv publish start` sets it, for engines with describe_chunks=true"

INSTEAD = {
    "cpu_bytes_to_use": "the pool is set with pool_bytes",
    "secondary_tiers": "a disk is set with disk_path",
    "store_threshold": "stop_unused_stores skips stores that do not pay",
    "sync_load_budget_bytes": (
        "when a load within a step fails, vLLM leaves blocks that did not come in its prefix "
        "cache; layerwise_loads=true loads within the step too, and takes them out"
    ),
    "load_deadline_s": _STEP,
    "flush_deadline_s": _STEP,
    "store_deadline_s": "a store has half a minute, and no request waits for it",
    "cancel_grace_s": "a NodeActor has two seconds to give up a copy",
    "fetch_deadline_s": _REQUEST,
    "lookup_deadline_s": f"{_REQUEST}: a fifth of that",
    "query_deadline_s": f"{_REQUEST}: a tenth of that",
    "attach_deadline_s": "start_deadline_s bounds it",
    "rpc_deadline_s": "an actor has five seconds for an answer, and no request waits for it",
    "fetch_bytes_per_s": _MEASURED,
    "prefill_tokens_per_s": _MEASURED,
    "fetch_checksums": "every chunk that comes from another node is checked",
    "metrics_sd_path": "the file is raykv_metrics_sd.json in Ray's session directory",
    "events_replay_endpoint": _PUBLISHED,
    "events_topic": _PUBLISHED,
    "events_format": _PUBLISHED,
    "events_hashes": _PUBLISHED,
}
"""Keys of vLLM's own offloading and of earlier versions, and what takes their place."""

ENV_PREFIX = "RAYKV_"

LOG_LEVEL = "RAYKV_LOG_LEVEL"
"""The one variable with our prefix that is not a setting of an engine."""

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


_SERVICE_LINK = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.+")


def _is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes sets it for a Service of the namespace whose name begins as our variables:
    `raykv-engines` makes `RAYKV_ENGINES_SERVICE_HOST` and `RAYKV_ENGINES_PORT=tcp://…`.
    """
    has_address = variable.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value) is not None
    return has_address or _SERVICE_LINK.fullmatch(variable) is not None


USUAL = {bool: parsing.flag, int: parsing.parse_size, float: parsing.seconds, str: parsing.text}
"""What reads a setting's values, by the kind of its default."""


def _setting(default: Any, what: str, parse: Callable[[str, Any], Any] | None = None) -> Any:
    return field(default=default, metadata={"parse": parse or USUAL[type(default)], "text": what})


@dataclass(frozen=True)
class MetricsPlace:
    """Where an actor shows its metrics; see the settings whose names begin with `metrics_`."""

    port: str = "auto"
    address: str = ""


@dataclass(frozen=True)
class DiskPlace:
    """Where a NodeActor keeps what its pool gives up; `path` empty: nowhere. Sizes in bytes.

    `most_bytes` None: half of the free space when it starts.
    """

    path: str = ""
    most_bytes: int | None = None
    floor_bytes: int = 4 << 30


@dataclass(frozen=True)
class NodeOptions:
    """What a NodeActor has besides its pool, and how it reads from others; see the settings.

    `metrics` None: it shows none. `pin_share`: of the pool, that pins may take.
    """

    metrics: MetricsPlace | None = None
    disk: DiskPlace = DiskPlace()
    transport: str = "ray"
    pin_share: float = 0.25


@dataclass(frozen=True)
class Settings:
    """All settings of an engine; deploy/settings.md is made of the texts here."""

    pool_bytes: int | None = _setting(
        None,
        "Size of this node's pool in RAM. Default: a quarter of the free memory of the machine or "
        "its control group",
        parsing.parse_size,
    )
    pool_path: str = _setting(
        "", "A file for the pool, which then survives its NodeActor. Default: anonymous RAM"
    )
    disk_path: str = _setting(
        "", "Folder on each node's disk for chunks that pools evict. Default: no disk tier"
    )
    disk_bytes: int | None = _setting(
        None,
        "Most bytes in disk_path, per node. Default: half of what is free at the start",
        parsing.parse_size,
    )
    disk_free_bytes: int = _setting(
        4 << 30, "Write nothing to disk_path while its file system has less than this free"
    )
    ray_address: str = _setting(
        "",
        "Ray cluster to join. Default: RAY_ADDRESS, else this user's on the host, else a new local "
        "one",
        parsing.address,
    )
    node_id: str = _setting(
        "", "Ray node of this engine. Default: that of the raylet it connects to"
    )
    weights_version: str = _setting(
        "",
        "Name of the weights, used together with their content; needed if that cannot be read "
        "(object storage)",
    )
    kv_handover: str = _setting(
        "auto",
        "How the NodeActor reaches the KV cache: by mapping it (ipc; CUDA IPC on GPUs), through "
        "staging memory that the engine copies (staged), or by mapping it if possible (auto)",
        parsing.one_of("auto", "ipc", "staged"),
    )
    staging_bytes: int = _setting(256 << 20, "Host memory for the staged hand-over, per rank")
    step_deadline_s: float = _setting(
        5.0,
        "Longest time of a load, after which its tokens are computed, and longest wait of a step "
        "for stores from blocks that vLLM takes away (preemption)",
    )
    layerwise_loads: bool = _setting(
        False,
        "Compute a loaded prompt in the same step, each layer as soon as its KV is there. That is "
        "faster if few requests run; with many, the whole step waits. Only for plain full "
        "attention, without speculation and pipeline parallelism",
    )
    durable_stores: bool = _setting(
        False,
        "End a step of the engine only when its chunks are in the pool, so that the chunks of an "
        "answered request are there; a step waits at most step_deadline_s. The last chunk of an "
        "answer comes one step later if it ends right before the answer's last token and "
        "async_scheduling is on (vLLM's default), or if the answer filled it and it belongs to a "
        "draft model's KV group",
    )
    request_deadline_s: float = _setting(
        10.0,
        "Longest wait of a request for chunks on their way from another node. A fifth of it is the "
        "longest wait for chunks that are still being stored, a tenth is the longest wait to "
        "learn which nodes have chunks",
    )
    stop_unused_stores: bool = _setting(
        True,
        "Store only one request in 16 while less than 3 % of a model's tokens that a node stores "
        "are loaded again or read by other nodes. This begins only after the pool was filled once "
        "and 2,048 chunks were stored",
    )
    transport: str = _setting(
        "ray",
        "How chunks go from node to node: Ray's object refs (ray), or NIXL if both nodes have it, "
        "else Ray (nixl; auto: the same, without a warning if NIXL cannot be loaded). Over TCP "
        "NIXL is slower than Ray; RDMA is untried. UCX listens without a password: see "
        "deploy/security.md. The first engine decides, or `raykv up`",
        parsing.one_of("auto", "ray", "nixl"),
    )
    always_fetch: bool = _setting(
        False,
        "Fetch chunks of other nodes and disks even if computing them is measured to be faster",
    )
    pin_share: float = _setting(
        0.25,
        "Greatest share of each pool that pins may take; pins of requests may take half of it. The "
        "first engine decides, or `raykv up`",
        parsing.share,
    )
    client_hints: str = _setting(
        "none",
        "What requests may ask for in kv_transfer_params and kv_hints: nothing (none), "
        "raykv_priority (priority), also raykv_session, raykv_session_over and raykv_pause_s "
        "(session), or also raykv_pin_s (pin)",
        parsing.one_of("none", "priority", "session", "pin"),
    )
    tenant_source: str = _setting(
        "salt",
        "What names a request's tenant: its cache_salt (salt), or raykv_tenant in "
        "kv_transfer_params, which your server must set or remove in every request (server)",
        parsing.one_of("salt", "server"),
    )
    start_deadline_s: float = _setting(
        60.0, "Longest wait for the actors at the start; then the engine runs without the cache"
    )
    metrics_port: str = _setting(
        "auto",
        "Port of the actors' metrics, on each node: any free one (auto), a number (or one of the "
        "15 after it, if it is taken), or off",
        parsing.port,
    )
    metrics_address: str = _setting(
        "", "Address of the actors' metrics. Default: the node's, as Ray has it"
    )
    hidden_states_path: str = _setting(
        "",
        "Folder for files of hidden states, or off. Default: raykv_hidden_states in the temporary "
        "folder",
    )
    hidden_states_bytes: int = _setting(
        1 << 30, "RAM per node for hidden states, in addition to the pool"
    )
    hidden_states_ttl_s: float = _setting(
        600.0, "How long hidden states are kept, and their files unless you remove them earlier"
    )
    hidden_states_client_paths: bool = _setting(
        False, "Let requests name the file of their hidden states: any file of the server"
    )
    window_share: float = _setting(
        0.25,
        "For models with sliding windows: RAM for windows in the middle of prompts, as a share of "
        "what full attention takes, so that prompts that share a beginning find it; 0 stores only "
        "the windows that vLLM keeps",
        parsing.ratio,
    )
    why_miss_text: bool = _setting(
        False,
        "Show, in raykv explain, the tokens at which a prompt leaves the cached one, not only "
        "their position",
    )
    describe_chunks: bool = _setting(
        False, "Send the token ids of stored chunks to the NodeActors, for readers of events"
    )
    events_endpoint: str = _setting(
        "",
        "Endpoint on Ray's head node where the cluster's events are published in vLLM's format, "
        "such as tcp://*:5557 (* is the node's address, 0.0.0.0 every address); includes "
        "describe_chunks. Default: not published",
        parsing.endpoint,
    )

    @property
    def lookup_s(self) -> float:
        """Longest wait of a request for chunks that are still being stored.

        Shorter than for a fetch, which takes the network too; longer than for an answer.
        """
        return self.request_deadline_s / 5

    @property
    def query_s(self) -> float:
        """Longest wait of a request to learn what other nodes have."""
        return self.request_deadline_s / 10

    @property
    def metrics_place(self) -> MetricsPlace:
        """The settings of metrics."""
        return MetricsPlace(self.metrics_port, self.metrics_address)

    @property
    def node_options(self) -> NodeOptions:
        """The settings of a NodeActor, but for those of its pool."""
        disk = DiskPlace(self.disk_path, self.disk_bytes, self.disk_free_bytes)
        return NodeOptions(self.metrics_place, disk, self.transport, self.pin_share)

    def labels(self) -> dict[str, str]:
        """All settings as labels of a metric; empty where RayKV chooses."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: "" if value is None else str(value) for name, value in values.items()}


def log_level(usual: str, environment: Mapping[str, str] = os.environ) -> str:
    """The level that the user has set, else the usual one.

    Raises:
        SettingError: there is no such level.
    """
    level = environment.get(LOG_LEVEL, usual).upper()
    if level not in LOG_LEVELS:
        raise errors.SettingError(
            f"{LOG_LEVEL}={parsing.shown(environment[LOG_LEVEL])} is no level: choose one of "
            f"{', '.join(LOG_LEVELS)}"
        )
    return level


def load_settings(
    extra_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> Settings:
    """Read all settings.

    Raises:
        SettingError: a key is unknown, or a value is not allowed; the text names both.
    """
    log_level("INFO", environment)
    known = {f.name: f for f in fields(Settings)}
    for key in extra_config:
        if not isinstance(key, str):
            raise errors.SettingError(
                f"a setting of RayKV has the name {parsing.shown(key)}, which is no text"
            )
        _refuse_replaced(key, key)
        if key not in known and key not in VLLM_KEYS:
            raise errors.SettingError(_unknown("setting", key, {*known, *VLLM_KEYS}))
    values: dict[str, Any] = {}
    for name, variable in variables_of(environment).items():
        values[name] = known[name].metadata["parse"](variable, environment[variable])
    for key, value in extra_config.items():
        if key in known:
            values[key] = known[key].metadata["parse"](key, value)
    return Settings(**values)


def variables_of(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that settings come from, by the names of these.

    Raises:
        SettingError: a variable of RayKV is that of no setting; the text names it.
    """
    known = {f.name for f in fields(Settings)}
    found = {}
    for variable, value in environment.items():
        if not variable.startswith(ENV_PREFIX) or variable == LOG_LEVEL:
            continue
        if _is_service_link(variable, value):
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        _refuse_replaced(name, variable)
        if name not in known:
            names = {ENV_PREFIX + n.upper() for n in known}
            raise errors.SettingError(_unknown("environment variable", variable, names))
        found[name] = variable
    return found


def _refuse_replaced(name: str, given_as: str) -> None:
    if name in INSTEAD:
        raise errors.SettingError(f"{given_as} is not a setting of RayKV: {INSTEAD[name]}")


def _unknown(what: str, name: str, allowed: set[str]) -> str:
    close = difflib.get_close_matches(name[: parsing.MAX_SHOWN], allowed, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"allowed are {', '.join(sorted(allowed))}"
    return f"unknown {what} {parsing.shown(name)} of RayKV: {hint}"


ANY_PORT = MetricsPlace()
"""Where actors show their metrics without settings."""

USUAL_OPTIONS = NodeOptions(ANY_PORT)
"""Of a NodeActor without settings."""
