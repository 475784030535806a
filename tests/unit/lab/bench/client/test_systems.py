"""What servers are started with, and what is said of those that are not there."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raykv.lab.bench.client.systems import (
    LMCACHE,
    PLAIN,
    RAYKV,
    Site,
    has_lmcache,
    missing_systems,
)
from raykv.serve.command import plan_serve

SITE = Site("folder/model", 8123, 4096, 48, 2 << 30, is_cpu=True)


def transfer_of(command: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
    return found


def test_all_servers_have_the_same_flags() -> None:
    commands = [
        SITE.alone(),
        SITE.native(),
        SITE.lmcache(sys.executable, (5001, 5002)),
        SITE.raykv("127.0.0.1:6379"),
    ]
    for command in commands:
        flags = " ".join(command)
        assert " ".join(SITE.flags()) in flags
        assert "--num-gpu-blocks-override 48" in flags
        assert "--port 8123" in flags
    assert "--kv-transfer-config" not in commands[0]


def test_only_servers_on_a_cpu_compute_in_float32() -> None:
    assert "--enforce-eager" in SITE.alone()
    assert "--enforce-eager" not in replace(SITE, is_cpu=False).alone()


def test_native_offloader_copies_in_process_on_a_cpu_only() -> None:
    extra = transfer_of(SITE.native())["kv_connector_extra_config"]
    assert extra["spec_module_path"] == "raykv.lab.bench.in_process"
    assert extra["cpu_bytes_to_use"] == 2 << 30
    on_gpu = " ".join(replace(SITE, is_cpu=False).native())
    assert "--kv-offloading-backend native --kv-offloading-size 2" in on_gpu


def test_lmcache_runs_in_its_own_python_and_starts_its_server() -> None:
    command = SITE.lmcache("/venv/bin/python", (5001, 5002))
    assert command[0] == "/venv/bin/python"
    transfer = transfer_of(command)
    assert transfer["kv_connector"] == "LMCacheMPConnector"
    assert transfer["kv_role"] == "kv_both"
    extra = transfer["kv_connector_extra_config"]
    assert extra["lmcache.mp.port"] == 5001
    assert "--http-port 5002" in extra["lmcache.mp.autostart.server_args"]


def test_raykv_is_served_with_its_pool_in_its_cluster() -> None:
    command = SITE.raykv("127.0.0.1:6379")
    flags = " ".join(command)
    assert "--pool-bytes 2147483648 --address 127.0.0.1:6379" in flags
    plan = plan_serve(SITE.model, SITE.flags(), ray_address="127.0.0.1:6379", pool_bytes="2GiB")
    assert plan.transfer["kv_connector"] == "RayKVConnector"


def test_missing_lmcache_is_named_in_one_line_with_what_to_do(tmp_path: Path) -> None:
    python = str(tmp_path / "python")
    assert not has_lmcache(python)
    found = missing_systems([PLAIN, LMCACHE, RAYKV], python)
    assert list(found) == [LMCACHE]
    assert "\n" not in found[LMCACHE]
    assert python in found[LMCACHE]
    assert "--lmcache-python" in found[LMCACHE]
    assert not missing_systems([PLAIN, RAYKV], python)


def test_other_python_that_has_lmcache_is_asked(tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").touch()
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert has_lmcache(str(python))
    assert not missing_systems([LMCACHE], str(python))


@pytest.mark.parametrize("name", ["plain", "raykv"])
def test_systems_that_are_always_there_are_never_missing(name: str) -> None:
    assert not missing_systems([name], "/no/python")
