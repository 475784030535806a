"""Scrapes as Prometheus makes them, and what is in them."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(target: str) -> str:
    """What a target ("host:port") shows now."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def by_label(text: str, name: str, label: str = "source") -> dict[str, float]:
    """What is not 0 of a metric's sums by a label; series without it are under ""."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                value = sample.labels.get(label, "")
                found[value] = found.get(value, 0.0) + sample.value
    return {each: value for each, value in found.items() if value}


def names_in(text: str) -> set[str]:
    """Names of the series that a scrape has, or will have once there is something in them."""
    found = set()
    for family in text_string_to_metric_families(text):
        found |= {sample.name for sample in family.samples}
        found |= {f"{family.name}_bucket"} if family.type == "histogram" else set()
    return found
