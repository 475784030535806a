"""What `raykv plan` and `raykv settings` say."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from raykv.base.errors import ClusterError, SettingError
from raykv.base.settings import Settings
from raykv.cli import app
from raykv.cluster import join
from raykv.protocol.node import DiskStats
from raykv.protocol.status import MoreRoom
from tests.fixtures.commands import STATUS, AnsweringCluster, run


def test_plan_says_whether_settings_fit(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from tests.fixtures.model_configs import LLAMA

    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    found = json.loads(run("plan", tmp_path, "--set", "pool_bytes=64MiB", "--json"))
    assert found["bytes_per_token"] == 512
    assert found["pool"]["pool_bytes"] == 64 << 20
    rows = [line.strip() for line in run("plan", tmp_path, "--set", "pool_bytes=8GiB").splitlines()]
    assert len([row for row in rows if row.startswith("8.0 GiB")]) == 1
    text = run("plan", tmp_path, "--set", "pool_bytes=4KiB", "--engine", "block-size=32", code=1)
    assert "a chunk     16.0 KiB" in text
    assert "wrong: a pool of 4.0 KiB has no room for a chunk of 16.0 KiB" in text


def test_live_plan_says_what_one_more_gib_saves(cluster: AnsweringCluster) -> None:
    cluster.answers["more_room"] = MoreRoom(
        window_s=1800.0,
        nodes=2,
        pool_bytes=16 << 30,
        prompt_tokens=9000,
        computed_tokens=4000,
        more_bytes=[1 << 29, 1 << 30, 1 << 31],
        saved_tokens=[500, 1000, 1500],
        reach_bytes=1 << 30,
    )
    text = run("plan", "--live")
    rows = {" ".join(line.split()) for line in text.splitlines()}
    assert "last 30 min had 9,000 prompt tokens, of which 4,000 were computed" in text
    assert text.startswith("2 pools of 8.0 GiB on average;")
    assert {
        "512.0 MiB 1,000 12.5%",
        "1.0 GiB 2,000 25.0%",
        "2.0 GiB at least 3,000 37.5%",
        "one more GiB in each pool would save 2,000 computed tokens per hour",
    } <= rows
    found = json.loads(run("plan", "--live", "--json"))
    assert found["saved_tokens_per_hour"] == [1000, 2000, 3000]
    assert found["computed_tokens"] == 4000


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "either a model, or --live"),
        (["model", "--live"], "either a model, or --live"),
        (["model", "--set", "pool_bytes"], "--set 'pool_bytes': give NAME=VALUE"),
        (["model", "--engine", "=2"], "--engine '=2': give NAME=VALUE"),
    ],
)
def test_plan_refuses_what_it_can_not_read(
    cluster: AnsweringCluster, arguments: list[str], sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        run("plan", *arguments)
    assert cluster.asked == []


# settings


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is here."""
    monkeypatch.setattr(join, "find_cluster", lambda _: None)


@pytest.fixture
def here(cluster: AnsweringCluster, monkeypatch: pytest.MonkeyPatch) -> AnsweringCluster:
    """The cluster is on this host, which is the node `n`."""
    monkeypatch.setattr(join, "find_cluster", lambda _: cluster.address)
    monkeypatch.setattr(join, "resolve_node_id", lambda _: "n")
    return cluster


def settings(*arguments: str) -> dict[str, tuple[object, str]]:
    """Value and source of each setting."""
    rows = json.loads(run("settings", *arguments, "--json"))
    assert [row["name"] for row in rows] == [each.name for each in fields(Settings)]
    return {row["name"]: (row["value"], row["source"]) for row in rows}


@pytest.mark.usefixtures("alone")
def test_settings_come_from_options_then_variables_then_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAYKV_POOL_BYTES", "1GiB")
    monkeypatch.setenv("RAYKV_DISK_PATH", "/kv")
    found = settings("--set", "pool_bytes=2GiB")
    assert found["pool_bytes"] == (2 << 30, "--set")
    assert found["disk_path"] == ("/kv", "RAYKV_DISK_PATH")
    assert found["pin_share"] == (Settings.pin_share, "default")


@pytest.mark.usefixtures("alone")
def test_source_of_a_setting_is_the_variable_that_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYKV_pool_bytes", "1GiB")
    # Kubernetes sets it in each pod beside a Service of the name raykv-metrics.
    monkeypatch.setenv("RAYKV_METRICS_PORT", "tcp://10.96.0.14:9464")
    found = settings()
    assert found["pool_bytes"] == (1 << 30, "RAYKV_pool_bytes")
    assert found["metrics_port"] == (Settings.metrics_port, "default")


@pytest.mark.usefixtures("alone")
def test_settings_are_a_table_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYKV_POOL_BYTES", "1GiB")
    rows = {" ".join(line.split()) for line in run("settings").splitlines()}
    assert {
        "pool_bytes 1.0 GiB RAYKV_POOL_BYTES",
        "disk_path - default",
        "layerwise_loads false default",
    } <= rows


def test_settings_of_a_pool_that_is_made_come_from_its_node(
    here: AnsweringCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings("--set", "pool_bytes=2GiB")["pool_bytes"] == (100, "node n, not --set")
    assert settings()["pool_bytes"] == (100, "node n")
    assert settings()["disk_bytes"] == (None, "default")
    disk = DiskStats(path="/kv", most_bytes=7)
    here.answers["status"] = replace(STATUS, nodes=[replace(STATUS.nodes[0], disk=disk)])
    monkeypatch.setenv("RAYKV_DISK_PATH", "/kv")
    found = settings()
    assert (found["disk_path"], found["disk_bytes"]) == (("/kv", "node n"), (7, "node n"))
    here.answers["status"] = replace(STATUS, nodes=[])
    assert settings()["pool_bytes"] == (None, "default")


def test_cluster_that_does_not_answer_is_said_and_fails_only_if_it_was_named(
    here: AnsweringCluster,
) -> None:
    here.answers["status"] = ClusterError("nobody answers")
    shown = CliRunner().invoke(app, ["settings"], catch_exceptions=False)
    assert (shown.exit_code, "pin_share" in shown.stdout) == (0, True)
    assert shown.stderr.endswith("has settled: nobody answers\n")
    with pytest.raises(ClusterError, match="nobody answers"):
        run("settings", "--address", "a:1")
