"""Metrics of all replicas on one page."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from raykv.serve.http.metrics import ReplicaMetrics, merge

AWKWARD = 'a "b" \\ {c}, d="e"\nf'


def page(replica: str, value: float, *, more: bool = False) -> ReplicaMetrics:
    registry = CollectorRegistry()
    counter = Counter("asked_total", "Help, with {braces}", ["model"], registry=registry)
    counter.labels(AWKWARD).inc(value)
    Gauge("alone", "Without labels", registry=registry).set(value)
    Histogram("took_seconds", "Buckets", registry=registry, buckets=(1, 2)).observe(value)
    if more:
        Gauge("extra", "Of one replica only", registry=registry).set(value)
    return ReplicaMetrics("dep", replica, generate_latest(registry).decode())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_sample_is_there_once_with_its_replica() -> None:
    pages = [page("r1", 1.5), page("r2", 2.5, more=True), page("r3", 0.5)]
    merged = merge(pages).decode()
    expected = {
        (name, labels | {("deployment", "dep"), ("replica", each.replica)}): value
        for each in pages
        for (name, labels), value in samples(each.text).items()
    }
    assert samples(merged) == expected
    assert len(expected) == 3 * 9 + 1
    assert merged.count("# TYPE asked_total counter") == merged.count("# HELP extra ") == 1


@given(st.text(max_size=20))
def test_any_name_of_a_replica_comes_out_as_it_was(name: str) -> None:
    lines = ReplicaMetrics("dep", name, "x_total 1\n")
    (labels,) = {dict(key[1])["replica"] for key in samples(merge([lines]).decode())}
    assert labels == name
