"""Metrics over HTTP: a real server and real connections on this machine."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from raykv.base.deadlines import ANSWER_S
from raykv.base.ids import Direction, Namespace, Refusal
from raykv.base.settings import MetricsPlace
from raykv.metrics import server as exposition
from raykv.metrics.server import (
    MAX_CONNECTIONS,
    PORTS_TRIED,
    Collect,
    MetricsServer,
    _Families,
)
from raykv.metrics.table import METRICS, histograms, number, numbers
from raykv.node.accounts.meter import NodeMeter
from raykv.protocol.measures import BreakerReport, HistogramData, MetricFamily, OpenBreaker
from raykv.protocol.node import NodeStats
from tests.fixtures.metric_lint import complaints
from tests.fixtures.node.owned_pool import PAGE, B, OwnedPool
from tests.fixtures.scrapes import by_label
from tests.fixtures.waiting import wait_until

HERE = "127.0.0.1"
LONG = Namespace("a" * 40)


def nodes() -> list[MetricFamily]:
    return [number("raykv_nodes", 3)]


def serving(collect: Collect = nodes, port: str = "auto", address: str = "") -> MetricsServer:
    return MetricsServer(MetricsPlace(port, address), HERE, collect)


def get(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def text_of(families: list[MetricFamily]) -> str:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Families(lambda: families))
    return generate_latest(registry).decode()


def test_scrape_has_what_was_collected_at_that_moment_and_one_that_fails_is_a_503() -> None:
    count = [0]

    def collect() -> list[MetricFamily]:
        count[0] += 1
        if count[0] == 2:
            raise ValueError("not now")
        return [number("raykv_nodes", count[0])]

    server = serving(collect, address="0.0.0.0")
    assert server.address.startswith(f"{HERE}:")
    assert "raykv_nodes 1.0" in get(server.address)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        get(server.address)
    assert "raykv_nodes 3.0" in get(server.address)


def test_port_that_is_taken_gives_way_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    first = serving()
    taken = first.address.rpartition(":")[2]
    second = serving(port=taken)
    assert not second.problem
    assert 0 < int(second.address.rpartition(":")[2]) - int(taken) < PORTS_TRIED
    assert "raykv_nodes" in get(second.address)
    monkeypatch.setattr(exposition, "PORTS_TRIED", 1)
    second = serving(port=taken)
    assert second.address == ""
    assert f"ports {taken} to {taken} of {HERE} are all taken" in second.problem


@pytest.mark.parametrize("address", ["192.0.2.1", "no such host", "a\0b"])
def test_address_that_is_not_ours_is_said_and_stops_nobody(address: str) -> None:
    server = serving(address=address)
    assert server.address == ""
    assert server.problem.startswith("no metrics: ")


def test_switched_off_has_no_server_and_no_problem() -> None:
    server = serving(port="off")
    assert (server.address, server.problem) == ("", "")


def connection(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def num_served() -> int:
    """Connections that threads are busy with."""
    return sum(each.name == "raykv-scrape" for each in threading.enumerate())


def test_silent_clients_neither_pile_up_nor_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exposition._Handler.timeout == ANSWER_S
    monkeypatch.setattr(exposition._Handler, "timeout", 0.5)
    server = serving()
    silent = [connection(server.address) for _ in range(3 * MAX_CONNECTIONS)]
    try:
        wait_until(lambda: num_served() == MAX_CONNECTIONS, 5.0, "all are busy")
        wait_until(lambda: num_served() == 0, 10.0, "the silent are left")
        assert "raykv_nodes" in get(server.address)
    finally:
        for each in silent:
            each.close()


@pytest.mark.parametrize("raw", [b"\0" * 100, b"GET /\r\n\r\n", b"G" * 100_000, b"\r\n", b""])
def test_garbage_is_survived(raw: bytes) -> None:
    server = serving()
    with closing(connection(server.address)) as sock:
        sock.sendall(raw)
    assert "raykv_nodes" in get(server.address)


def test_only_reading_is_allowed() -> None:
    server = serving()
    client = http.client.HTTPConnection(server.address, timeout=5)
    client.request("POST", "/metrics", b"x")
    assert client.getresponse().status == 405
    client.close()
    assert get(server.address, "/metrics?name[]=raykv_none") == ""


# What a NodeActor shows


def pool() -> OwnedPool:
    """With engines of two namespaces, lives 1 and 2."""
    made = OwnedPool(num_slabs=8)
    made.hello(1, LONG)
    made.hello(2, B)
    return made


def test_pool_bytes_add_up_to_the_pool_by_state_and_namespace() -> None:
    made = pool()
    made.store(*range(5), life=1, namespace=LONG)
    made.store(0, 1, life=2, namespace=B)
    made.admit(made.storing(2, namespace=B), life=2)
    text = text_of(NodeMeter().families(NodeStats(pool_bytes=32 * PAGE), made.node))
    assert complaints(text) == []
    found = {
        (sample.labels["state"], sample.labels["namespace"]): sample.value / PAGE
        for family in text_string_to_metric_families(text)
        if family.name == "raykv_pool_bytes"
        for sample in family.samples
    }
    assert found == {
        ("ready", "a" * 12): 5,
        ("ready", "b"): 2,
        ("writing", "b"): 1,
        ("empty", ""): 24,
    }
    assert f"raykv_unreported_chunks {made.node.reporting.num_unread}.0" in text


def test_engines_of_a_node_are_counted_beside_its_own_breakers() -> None:
    made = pool()
    for seq, tokens in ((1, 0), (2, 30)):
        told = {"prompt_tokens": 2 * tokens, "loaded_tokens": tokens, "stores_without_room": tokens}
        row = OpenBreaker("scheduler", "open", 1, 1.0, "late")
        breakers = BreakerReport([row], opened=seq)
        made.tell(2, B, counters=told, breakers=breakers)
    text = text_of(NodeMeter().families(NodeStats(), made.node))
    assert complaints(text) == []
    name = "raykv_cluster_prompt_tokens_total"
    assert by_label(text, name) == {"computed": 30, "same_node": 30}
    assert by_label(text, "raykv_stores_without_room_total", "namespace") == {"b": 30}
    assert by_label(text, "raykv_open_breakers", "owner") == {"engine": 1}
    assert by_label(text, "raykv_breaker_openings_total", "owner") == {"engine": 1}


def test_jobs_and_refusals_are_measured() -> None:
    meter = NodeMeter()
    meter.ran(Direction.LOAD, 0.2, 0.01)
    meter.refusals.update([Refusal.NOT_HERE, Refusal.NOT_HERE, Refusal.CANCELLED])
    text = text_of(meter.families(NodeStats(), pool().node))
    for line in (
        'raykv_queue_seconds_bucket{direction="load",le="0.1"} 0.0',
        'raykv_queue_seconds_bucket{direction="load",le="0.25"} 1.0',
        'raykv_queue_seconds_bucket{direction="load",le="+Inf"} 1.0',
        'raykv_queue_seconds_sum{direction="load"} 0.2',
        'raykv_copy_seconds_bucket{direction="load",le="0.01"} 1.0',
        'raykv_copy_seconds_count{direction="store"} 0.0',
        'raykv_refused_chunks_total{reason="not_here"} 2.0',
        'raykv_refused_chunks_total{reason="cancelled"} 1.0',
    ):
        assert line in text


def test_every_metric_of_the_table_is_in_good_form() -> None:
    for metric in METRICS.values():
        labels = tuple("x" for _ in metric.labels)
        data = HistogramData([0] * (len(metric.bounds) + 1))
        family = (
            histograms(metric.name, [(labels, data)])
            if metric.bounds
            else numbers(metric.name, {labels: 1})
        )
        assert complaints(text_of([family])) == [], metric.name


@pytest.mark.parametrize(
    ("name", "samples", "why"),
    [
        ("raykv_x_total", " -1", "a counter of -1"),
        ("raykv_x_ms", " 1", "base units"),
        ("x", " 1", "begins with raykv_"),
        ("raykv_x", '{job="a"} 1', "the label job"),
        ("raykv_x", " 1\n 1", "twice"),
        ("raykv_x", ' 1\n{a="b"} 1', "different"),
        (
            "raykv_x_seconds",
            '_bucket{le="1"} 3\n_bucket{le="+Inf"} 2\n_count 2',
            "don't add up",
        ),
    ],
)
def test_bad_form_is_found(name: str, samples: str, why: str) -> None:
    kinds = {"raykv_x_total": "counter", "raykv_x_seconds": "histogram"}
    lines = [name + each for each in samples.split("\n")]
    head = [f"# HELP {name} X.", f"# TYPE {name} {kinds.get(name, 'gauge')}"]
    bad = "\n".join([*head, *lines, ""])
    assert any(why in complaint for complaint in complaints(bad)), complaints(bad)
    assert complaints("") == ["nothing is there"]
    no_sentence = complaints("# HELP raykv_x X\n# TYPE raykv_x gauge\nraykv_x 1\n")
    assert any("sentence" in complaint for complaint in no_sentence)
