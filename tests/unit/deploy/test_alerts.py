"""The alert rules ask for what RayKV exports, and fire when they should: promtool runs them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from raykv.metrics.table import METRICS, MetricKind
from tests.house import ROOT

FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "rules.yml"
ALERTS: dict[str, dict[str, Any]] = {
    rule["alert"]: rule
    for group in yaml.safe_load(RULES.read_text())["groups"]
    for rule in group["rules"]
}
OF_THE_TARGET = {"cluster", "instance", "job"}

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="rules are run by promtool, which is not here (Debian: apt install prometheus)",
)
every_alert = pytest.mark.parametrize("name", ALERTS)


HERE = {"cluster": "c", "instance": "a"}


@dataclass(frozen=True)
class Trouble:
    """Series by minute, and the alert that they must cause by then."""

    series: dict[str, str]
    minute: int
    summary: str
    labels: dict[str, str] = field(default_factory=lambda: HERE)


TROUBLES = {
    "RayKVSchedulerGone": Trouble(
        {"raykv_nodes{cluster='c'}": "2x9 stale", "raykv_pool_size_bytes{cluster='c'}": "1x30"},
        17,
        "No scheduler actor of c reports",
        {"cluster": "c"},
    ),
    "RayKVNodeGone": Trouble(
        {"raykv_nodes{cluster='c'}": "3x9 2x90"},
        17,
        "2 nodes of c report; there were more",
        {"cluster": "c"},
    ),
    "RayKVNoPool": Trouble(
        {"raykv_pool_size_bytes{cluster='c', instance='a'}": "0x20", "raykv_nodes": "1x20"},
        12,
        "a lends no RAM",
    ),
    "RayKVBreakerOpen": Trouble(
        {"raykv_open_breakers{owner='node', peer='engine', state='open'}": "0x9 2x20"},
        22,
        "node has stopped calling engine",
        {"owner": "node", "peer": "engine"},
    ),
    "RayKVChunksQuarantined": Trouble(
        {"raykv_quarantined_chunks_total{cluster='c', instance='a'}": "0x9 1x20"},
        12,
        "Bytes of the pool of a have changed",
    ),
    "RayKVDiskDamaged": Trouble(
        {"raykv_disk_damaged_total{cluster='c', instance='a', kind='file'}": "0x9 1x20"},
        12,
        "A file of the disk tier of a was damaged",
        {**HERE, "kind": "file"},
    ),
    "RayKVDiskWritesFail": Trouble(
        {"raykv_disk_failed_writes_total{cluster='c', instance='a'}": "0x9 1+1x20"},
        18,
        "The disk tier of a can't be written",
    ),
    "RayKVFetchesFail": Trouble(
        {
            "raykv_failed_fetches_total{cluster='c', instance='a'}": "0+2x40",
            "raykv_fetched_chunks_total{cluster='c', instance='a'}": "0+1x40",
        },
        25,
        "Most fetches of a fail",
    ),
    "RayKVStoresFindNoRoom": Trouble(
        {"raykv_stores_without_room_total{cluster='c', instance='s', namespace='n'}": "0+1x40"},
        25,
        "Chunks of n find no room",
        {"cluster": "c", "namespace": "n"},
    ),
    "RayKVThreadsFail": Trouble(
        {"raykv_failed_threads_total{cluster='c', instance='a'}": "0x9 1x20"},
        12,
        "Threads of a failed",
    ),
    "RayKVPaused": Trouble(
        {"raykv_paused{cluster='c'}": "1x40"}, 35, "RayKV is paused in c", {"cluster": "c"}
    ),
}

CALM = {
    "raykv_nodes": "1x5 2x120",
    "raykv_paused": "0x30 1x10 0x90",
    "raykv_pool_size_bytes{instance='a'}": "0x5 100x120",
    "raykv_open_breakers{owner='node', peer='node', state='half_open'}": "1x125",
    "raykv_open_breakers{owner='node', peer='engine', state='open'}": "0x30 1x3 0x92",
    "raykv_quarantined_chunks_total": "3x125",
    "raykv_disk_damaged_total{kind='chunk'}": "3x125",
    "raykv_disk_failed_writes_total": "3x125",
    "raykv_failed_fetches_total": "0+1x125",
    "raykv_fetched_chunks_total": "0+2x125",
    "raykv_stores_without_room_total{namespace='n'}": "0x30 9x95",
    "raykv_failed_threads_total": "3x125",
}
"""What an alert would be a nuisance for: a start, short troubles, a few failures of many."""


def metrics_in(expression: str) -> list[str]:
    return re.findall(r"\braykv_\w+", expression)


def labels_of_result(expression: str) -> set[str]:
    """Labels that a notification may name."""
    if groups := re.findall(r"\bby \(([\w, ]+)\)", expression):
        return {label.strip() for label in groups[0].split(",")}
    return OF_THE_TARGET.union(*(METRICS[name].labels for name in metrics_in(expression)))


def promtool(folder: Path, rules: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    """What `promtool test rules` complains of; empty if the rules do as the cases say."""
    (folder / "rules.yml").write_text(json.dumps(rules))
    tests = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": cases}
    (folder / "tests.yml").write_text(json.dumps(tests))
    done = subprocess.run(
        ["promtool", "test", "rules", "tests.yml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode == 0) == ("SUCCESS" in done.stdout), done
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def case(series: dict[str, str], minute: int, alert: str, *fired: dict[str, Any]) -> dict[str, Any]:
    """Of promtool's."""
    given = [
        {"series": name, "values": re.sub(r"(?<![+\d])(\d+)x", r"\1+0x", values)}
        for name, values in series.items()
    ]
    wanted = {"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": list(fired)}
    return {"interval": "1m", "input_series": given, "alert_rule_test": [wanted]}


def trouble_case(name: str) -> dict[str, Any]:
    trouble, rule = TROUBLES[name], ALERTS[name]
    notes = {**rule["annotations"], "summary": trouble.summary}
    fired = {"exp_labels": {**rule["labels"], **trouble.labels}, "exp_annotations": notes}
    return case(trouble.series, trouble.minute, name, fired)


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    assert set(ALERTS) == set(TROUBLES)
    for rule in ALERTS.values():
        assert rule["alert"].startswith("RayKV")
        assert rule["labels"]["severity"] in ("info", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["annotations"]["description"].endswith((".", "on."))


@every_alert
def test_alert_asks_for_metrics_that_raykv_exports_by_their_labels(name: str) -> None:
    text = ALERTS[name]["expr"]
    names = metrics_in(text)
    assert names
    for metric in names:
        is_counter = METRICS[metric].kind is MetricKind.COUNTER
        assert METRICS[metric].kind is not MetricKind.HISTOGRAM
        assert is_counter == bool(re.search(rf"\b(rate|increase)\({metric}[{{\[]", text)), metric
    known = OF_THE_TARGET.union(*(METRICS[metric].labels for metric in names))
    asked = set(re.findall(r"(\w+)=~?\"", text))
    for group in re.findall(r"(?:by|on) \(([^)]*)\)", text):
        asked |= {label.strip() for label in group.split(",")}
    assert asked <= known, asked - known


@every_alert
def test_alert_names_only_labels_that_its_result_has(name: str) -> None:
    rule = ALERTS[name]
    used = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
    assert used <= labels_of_result(rule["expr"])


@every_alert
def test_alert_parses(name: str) -> None:
    parser = pytest.importorskip("promql_parser")
    parser.parse(ALERTS[name]["expr"])


def test_names_and_labels_of_an_expression_are_found() -> None:
    assert metrics_in("increase(raykv_a_total[1h]) > raykv_b{c='d'}") == [
        "raykv_a_total",
        "raykv_b",
    ]
    assert labels_of_result("sum by (cluster, owner) (raykv_open_breakers)") == {"cluster", "owner"}
    assert "kind" in labels_of_result("raykv_disk_damaged_total > 0")
    assert "kind" not in labels_of_result("raykv_nodes > 0")


def test_prometheus_is_given_the_rules() -> None:
    for name in ("prometheus.yml", "kubernetes.yml"):
        assert yaml.safe_load((FOLDER / name).read_text())["rule_files"] == [RULES.name]


@needs_promtool
@every_alert
def test_alert_fires(name: str, tmp_path: Path) -> None:
    rules = yaml.safe_load(RULES.read_text())
    assert promtool(tmp_path, rules, [trouble_case(name)]) == ""


@needs_promtool
def test_no_alert_fires_where_all_is_well_or_nothing_is_there(tmp_path: Path) -> None:
    cases = [case(series, 45, name) for series in (CALM, {}) for name in ALERTS]
    assert promtool(tmp_path, yaml.safe_load(RULES.read_text()), cases) == ""


@needs_promtool
def test_prometheus_takes_the_configuration() -> None:
    # Debian's promtool does not know Kubernetes.
    command = ["promtool", "check", "config", str(FOLDER / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done
