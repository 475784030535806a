"""The servers that are compared: what each is started with, and which can't be here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raykv.lab.bench.client.workloads import SERVED
from raykv.lab.bench.serving import BLOCK, in_process_connector
from raykv.vllm import command as vllm_command

PLAIN, NATIVE, LMCACHE, RAYKV = "plain", "native", "lmcache", "raykv"
SUBJECTS = {
    PLAIN: "vLLM alone",
    NATIVE: "native offloader",
    LMCACHE: "LMCache",
    RAYKV: "RayKV",
}
"""By name, in the order of the first repeat."""

LOOK_S = 60.0
"""For another Python to say whether it has LMCache."""

GIB = 1 << 30


@dataclass(frozen=True)
class Site:
    """What all servers have in common. `is_cpu`: vLLM's CPU build, in float32."""

    model: str
    port: int
    max_tokens: int
    kv_blocks: int
    pool_bytes: int
    is_cpu: bool

    def flags(self) -> list[str]:
        """Of `vllm serve`. Answers are greedy where a client does not say how they are sampled."""
        on_cpu = ("--dtype", "float32", "--enforce-eager") if self.is_cpu else ()
        return [
            *("--host", "127.0.0.1", "--port", f"{self.port}", "--served-model-name", SERVED),
            *("--max-model-len", f"{self.max_tokens}", "--block-size", f"{BLOCK}"),
            *("--num-gpu-blocks-override", f"{self.kv_blocks}"),
            *("--generation-config", "vllm"),
            *("--override-generation-config", '{"temperature": 0}'),
            *on_cpu,
        ]

    def alone(self, python: str = sys.executable) -> list[str]:
        """vLLM with nothing beside it."""
        serve = (python, "-P", "-m", vllm_command.__name__, "serve", self.model)
        return [*serve, *self.flags()]

    def native(self) -> list[str]:
        """vLLM's own offloading into the engine's memory."""
        if self.is_cpu:
            return [*self.alone(), *_transfer(in_process_connector(self.pool_bytes))]
        size = f"{self.pool_bytes / GIB:g}"
        flags = ("--kv-offloading-backend", "native", "--kv-offloading-size", size)
        return [*self.alone(), *flags]

    def lmcache(self, python: str, ports: tuple[int, int]) -> list[str]:
        """vLLM with LMCache's server, which the engine starts and ends; `ports` are the server's.

        It keeps what is generated too, as the others do.
        """
        # On a CPU the engine copies, into memory that both map.
        mode = "engine_driven" if self.is_cpu else "auto"
        server = (
            *("--supported-transfer-mode", mode),
            *("--l1-size-gb", f"{self.pool_bytes / 1e9:g}", "--no-l1-use-lazy"),
            *("--eviction-policy", "LRU"),
            *("--chunk-size", f"{BLOCK}", "--http-port", f"{ports[1]}"),
            *("--shm-name", self.shared_memory),
        )
        extra = {
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": " ".join(server),
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": ports[0],
            "lmcache.mp.save_decode_cache": True,
        }
        connector = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": extra}
        return [*self.alone(python), *_transfer(connector)]

    @property
    def shared_memory(self) -> str:
        """What LMCache's server calls its memory."""
        return f"lmcache_l1_pool_raykv-bench-{self.port}"

    def raykv(self, ray_address: str) -> list[str]:
        """`raykv serve`."""
        return [
            *(sys.executable, "-P", "-c", "from raykv.cli import main; main()", "serve"),
            *(self.model, "--pool-bytes", f"{self.pool_bytes}", "--address", ray_address),
            *self.flags(),
        ]


def _transfer(connector: dict[str, Any]) -> list[str]:
    return ["--kv-transfer-config", json.dumps({"kv_role": "kv_both", **connector})]


def has_lmcache(python: str) -> bool:
    """Whether that Python finds LMCache; nothing of it is imported."""
    if Path(python) == Path(sys.executable):
        return importlib.util.find_spec("lmcache") is not None
    asks = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('lmcache'))"
    try:
        return subprocess.run([python, "-c", asks], check=False, timeout=LOOK_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def missing_systems(systems: Sequence[str], python: str) -> dict[str, str]:
    """Those that can't be started, with a sentence that says why."""
    if LMCACHE not in systems or has_lmcache(python):
        return {}
    return {
        LMCACHE: f"LMCache is left out: {python} does not have it. It needs older packages than "
        "Ray: name the Python of an environment with vLLM, RayKV and LMCache with --lmcache-python."
    }
