"""Metrics of real actors, scraped as Prometheus does it; no engine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from raykv.base.ids import MissReason, TokenSource
from raykv.base.settings import MetricsPlace, NodeOptions
from raykv.client.cluster import Cluster
from raykv.cluster import join as clusters
from raykv.directory.actor import scheduler_actor
from raykv.metrics.discovery import default_path
from raykv.metrics.table import BREAKERS, BUILD, CLUSTER, METRICS, NODE
from raykv.node.launch import node_actor
from tests.fixtures.dashboard import metrics_of_all_panels
from tests.fixtures.metric_lint import complaints
from tests.fixtures.played_engine import PlayedEngine
from tests.fixtures.scrapes import names_in, scrape
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def sd_path(cluster: Cluster) -> Path:
    """In Ray's session directory, without what other actors have left there."""
    cluster.down()
    path = default_path()
    assert path is not None
    path.unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def running(cluster: Cluster, sd_path: Path) -> Iterator[Cluster]:
    """Both actors, with the file of their targets."""
    place = MetricsPlace()
    scheduler_actor(cluster.address, metrics=place)
    node_id = clusters.resolve_node_id("")
    node_actor(cluster.address, node_id, POOL_BYTES, 1 << 20, "", NodeOptions(place))
    wait_until(lambda: len(targets(sd_path)) == 2, 60.0, "both actors are in the file of targets")
    yield cluster
    cluster.down()


def targets(path: Path) -> list[str]:
    if not path.exists():
        return []
    (group,) = json.loads(path.read_text())
    assert group["labels"].keys() == {"job", "cluster"}
    found: list[str] = group["targets"]
    return found


def value(text: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    raise AssertionError(f"no {name} with {labels} in\n{text}")


def own(name: str) -> bool:
    """Whether the actors serve it, not the engines."""
    return name.removesuffix("_bucket") in METRICS


def families_of(text: str) -> set[str]:
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}


def test_both_actors_show_all_their_metrics_in_good_form(running: Cluster, sd_path: Path) -> None:
    status = running.status()
    scheduler, node = targets(sd_path)
    assert (status.metrics, status.nodes[0].metrics) == (scheduler, node)
    own = {"scheduler": CLUSTER, "node": (*BREAKERS, *NODE)}
    for name, target in (("scheduler", scheduler), ("node", node)):
        text = scrape(target)
        assert complaints(text) == []
        wanted = {metric.name for metric in (BUILD, *own[name])}
        assert families_of(text) == wanted
    assert set(METRICS) == {metric.name for metric in (BUILD, *BREAKERS, *NODE, *CLUSTER)}
    assert value(scrape(node), "raykv_pool_bytes", state="empty", namespace="") == POOL_BYTES
    assert value(scrape(scheduler), "raykv_nodes") == 1


def test_tokens_of_an_engine_are_counted_by_source_with_one_sum(
    running: Cluster, sd_path: Path
) -> None:
    engine = PlayedEngine(
        clusters.resolve_node_id(""), "played", "n" * 40, num_blocks=None, model="a/model"
    )
    engine.tell(counters={"prompt_tokens": 0})
    counters = {
        "prompt_tokens": 100,
        "own_cache_tokens": 10,
        "loaded_tokens": 50,
        "fetched_tokens": 20,
        "missed_tokens_evicted": 40,
        "wanted_chunks": 8,
    }
    for _ in range(2):
        engine.tell(counters=counters)
    # It has read them when it answers.
    engine.hear()
    text = scrape(targets(sd_path)[1])
    expected = {"computed": 40, "own_cache": 10, "same_node": 30, "other_node": 20, "disk": 0}
    found = {
        str(source): value(
            text, "raykv_cluster_prompt_tokens_total", namespace="n" * 12, source=str(source)
        )
        for source in TokenSource
    }
    assert found == expected
    missed = {
        reason: value(
            text, "raykv_cluster_missed_tokens_total", namespace="n" * 12, reason=str(reason)
        )
        for reason in MissReason
    }
    assert missed == {reason: 40 * (reason is MissReason.EVICTED) for reason in MissReason}

    def are_introduced() -> bool:
        told = scrape(targets(sd_path)[0])
        has_engine = value(told, "raykv_engines", namespace="n" * 12) == 1
        return has_engine and bool(value(told, "raykv_namespace_info", **info))

    info = {"namespace": "n" * 12, "model": "a/model"}
    wait_until(are_introduced, 10.0, "the node introduces its engine")
    running.quotas.set("quiet", guaranteed=0.1)
    served = names_in(scrape(targets(sd_path)[0])) | names_in(scrape(targets(sd_path)[1]))
    running.quotas.remove("quiet")
    assert {name for name in metrics_of_all_panels() if own(name)} <= served
    engine.end()


def test_killed_node_actor_is_a_target_again_where_it_is_back(
    running: Cluster, sd_path: Path
) -> None:
    before = targets(sd_path)
    os.kill(running.status().nodes[0].pid, 9)

    def is_back() -> bool:
        now = targets(sd_path)
        return len(now) == 2 and now != before

    wait_until(is_back, 60.0, "the file has the new port")
    assert "raykv_pool_size_bytes" in scrape(targets(sd_path)[1])
    assert targets(sd_path)[0] == before[0]
