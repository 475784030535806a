"""What `promtool check metrics` complains of, and what RayKV wants beyond it; one sentence each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

UNITS = ("seconds", "bytes", "ratio", "tokens", "chunks")

OTHER_UNITS = (
    "milliseconds", "ms", "microseconds", "us", "nanoseconds", "ns", "minutes", "hours", "days",
    "kib", "mib", "gib", "kb", "mb", "gb", "kilobytes", "megabytes", "gigabytes", "percent", "bits",
)  # fmt: skip

RESERVED = {"le", "quantile", "job", "instance"}

MAX_SERIES = 400
"""Of one metric of one target."""


def complaints(text: str) -> list[str]:
    """What is wrong with a scrape."""
    found = list(_repetitions(text))
    families = list(text_string_to_metric_families(text))
    if not families:
        found.append("nothing is there")
    for family in families:
        found += [f"{family.name}: {wrong}" for wrong in _wrongs(family)]
    return found


def _repetitions(text: str) -> Iterator[str]:
    names = Counter(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    for name, count in names.items():
        if count > 1:
            yield f"{name}: {count} times in one scrape"


def _wrongs(family: Metric) -> Iterator[str]:
    is_counter = family.type == "counter"
    # The parser takes it off.
    name = f"{family.name}_total" if is_counter else family.name
    if not re.fullmatch(r"raykv_[a-z][a-z0-9_]*[a-z0-9]", name):
        yield "a name in lower case that begins with raykv_"
    if not is_counter and name.endswith(("_total", "_count", "_sum", "_bucket")):
        yield f"a {family.type} must not end so"
    if family.type not in ("counter", "gauge", "histogram"):
        yield f"of type {family.type}"
    for unit in OTHER_UNITS:
        if unit in name.split("_"):
            yield f"the unit {unit} is none of Prometheus' base units"
    if not family.documentation or not family.documentation.endswith("."):
        yield f"HELP must be a sentence: {family.documentation!r}"
    if family.type == "histogram" and not name.endswith(UNITS):
        yield "a histogram without a unit"
    yield from _wrong_samples(family)


def _wrong_samples(family: Metric) -> Iterator[str]:
    samples = Counter((each.name, tuple(sorted(each.labels.items()))) for each in family.samples)
    yield from (f"the series {name} twice" for name, count in samples.items() if count > 1)
    if len(samples) > MAX_SERIES:
        yield f"{len(samples)} series"
    own = {"le"} if family.type == "histogram" else set()
    names = {frozenset(set(each.labels) - own) for each in family.samples}
    if len(names) > 1:
        yield f"series with different labels: {names}"
    for label in {label for labels in names for label in labels}:
        if label in RESERVED or not re.fullmatch("[a-z][a-z_]*", label):
            yield f"the label {label}"
    for sample in family.samples:
        if family.type == "counter" and not sample.value >= 0:
            yield f"a counter of {sample.value}"
    if family.type == "histogram":
        yield from _wrong_buckets(family)


def _wrong_buckets(family: Metric) -> Iterator[str]:
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    counts: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        if sample.name.endswith("_bucket"):
            series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_count"):
            counts[labels] = sample.value
    if series.keys() != counts.keys():
        yield "buckets without a count"
    for labels, buckets in series.items():
        if buckets != sorted(buckets) or buckets[-1][0] != float("inf"):
            yield f"buckets out of order: {buckets}"
        values = [value for _, value in buckets]
        if values != sorted(values) or values[-1] != counts.get(labels):
            yield f"buckets that don't add up: {buckets}"
