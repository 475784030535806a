"""Writes settings.md, the page of all settings: `python deploy/settings.py`.

Names, defaults and meanings are those of `raykv/base/settings.py`; here is only their order.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from raykv.base.parsing import parse_size
from raykv.base.settings import Settings
from raykv.memory.room import human_bytes

TARGET = Path(__file__).with_name("settings.md")

WIDTH = 100

TOPICS = {
    "The pool": "pool_bytes pool_path pin_share client_hints tenant_source",
    "The disk tier": "disk_path disk_bytes disk_free_bytes",
    "Which cluster, which node, which weights": "ray_address node_id weights_version",
    "Storing and loading": (
        "kv_handover staging_bytes window_share layerwise_loads durable_stores stop_unused_stores"
    ),
    "Chunks of other nodes": "transport always_fetch",
    "Deadlines": "request_deadline_s step_deadline_s start_deadline_s",
    "Metrics": "metrics_port metrics_address",
    "Hidden states": (
        "hidden_states_path hidden_states_bytes hidden_states_ttl_s hidden_states_client_paths"
    ),
    "What operators see": "why_miss_text",
    "Events": "describe_chunks events_endpoint",
}
"""Every setting once, under the heading where a reader looks for it."""

TOP = """\
# Settings

`python deploy/settings.py` writes this page from `raykv/base/settings.py`: change that file, not
this page.

Settings belong in vLLM's `kv_connector_extra_config`. A setting that is not there comes from the
environment variable `RAYKV_<NAME>`, as in `RAYKV_POOL_BYTES=64GiB`, or has its default. RayKV
ignores variables that Kubernetes sets for a Service called `raykv…`. Sizes may be written like
"8GiB" or "8Gi". An unknown key, an invalid value or an unsupported vLLM stops the engine's start
with one sentence that says what to do. `raykv plan MODEL --set NAME=VALUE`
says whether settings fit a model before anything starts.

The first engine on a node decides the size of the node's pool; an engine that asks for another size
gets a warning with both numbers. `RAYKV_LOG_LEVEL` (default: INFO) is not a setting of an engine;
it sets the level of RayKV's log.
"""

BOTTOM = """\
## Keys of vLLM

`block_size`, `blocks_per_chunk`, `self_describing_kv_events` and `offload_prompt_only` mean what
they mean in vLLM. `offload_prompt_only` is false by default, because conversations need generated
tokens too.

With `canonical_layout: true`, engines of different tensor-parallel sizes share chunks if vLLM
certifies the order of the bytes; otherwise the start is refused. All of these engines need the key,
the same block size and the same KV layout. `VLLM_KV_CACHE_LAYOUT=LBHNC` copies whole pages,
`LBNHC` many small pieces.
"""


def default_text(setting: Field[Any]) -> str:
    """A default as one would write it; empty where the setting's text says what happens."""
    value: Any = setting.default
    if value is None or value == "":
        return ""
    if setting.metadata["parse"] is parse_size:
        return human_bytes(value).replace(".0 ", "")
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def entry(setting: Field[Any]) -> str:
    """One setting, as an entry of a list."""
    default = default_text(setting)
    name = f"`{setting.name}`" + (f" = `{default}`" if default else "")
    text = f"* **{name}**: {setting.metadata['text']}."
    return textwrap.fill(
        text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def page() -> str:
    """The whole page.

    Raises:
        ValueError: a setting has no topic, or more than one.
    """
    known = {setting.name: setting for setting in fields(Settings)}
    names = [name for topic in TOPICS.values() for name in topic.split()]
    if sorted(names) != sorted(known):
        raise ValueError(f"each once in TOPICS: {sorted(set(names) ^ set(known)) or names}")
    parts = [TOP]
    for topic, listed in TOPICS.items():
        entries = [entry(known[name]) for name in listed.split()]
        parts.append("\n".join([f"## {topic}", "", *entries, ""]))
    return "\n".join([*parts, BOTTOM])


if __name__ == "__main__":
    TARGET.write_text(page())
