"""Grafana's dashboard is what its script makes, and asks only for what there is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.grafana import make
from raykv.metrics.table import METRICS, MetricKind
from tests.fixtures.dashboard import metrics_of_all_panels

LOADED = json.loads(make.TARGET.read_text())

ENGINES = ("vllm:", "raykv_prompt_tokens_total", "raykv_missed_tokens_total")
"""What engines serve."""


def panels() -> list[dict[str, Any]]:
    """All, also those that a collapsed row holds."""
    return [each for panel in LOADED["panels"] for each in (panel, *panel.get("panels", ()))]


def charts() -> list[dict[str, Any]]:
    return [panel for panel in panels() if panel["type"] != "row"]


def units(chart: dict[str, Any]) -> dict[str, str]:
    """Of each query, by its expression."""
    named = {query["refId"]: query["expr"] for query in chart["targets"]}
    found = dict.fromkeys(named.values(), chart["fieldConfig"]["defaults"]["unit"])
    for override in chart["fieldConfig"]["overrides"]:
        values = {each["id"]: each["value"] for each in override["properties"]}
        found[named[override["matcher"]["options"]]] = values["unit"]
    return found


def unit_by_name(text: str) -> str | None:
    """Of what a query without a division asks for, if the names of its metrics say it."""
    if "_seconds" in text:
        return "s"
    if "_bytes" not in text:
        return None
    return "Bps" if re.search(r"rate\([\w:]+_bytes_total\b", text) else "bytes"


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, str):
        yield value


def test_file_is_what_the_script_makes() -> None:
    assert make.TARGET.read_text() == make.text(), "run python deploy/grafana/make.py"


def test_dashboard_loads_without_edits() -> None:
    assert (LOADED["uid"], LOADED["schemaVersion"]) == ("raykv", 39)
    assert "id" not in LOADED
    assert "__inputs" not in LOADED
    variables = {each["name"] for each in LOADED["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(texts(LOADED))))
    assert (
        used - {"__rate_interval", "__all"} == variables == {"datasource", "cluster", "namespace"}
    )
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    assert {panel["type"] for panel in panels()} == {"row", "stat", "timeseries"}
    for chart in charts():
        sources = [chart["datasource"], *(each["datasource"] for each in chart["targets"])]
        assert all(source == make.SOURCE for source in sources)


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    # A collapsed row holds its panels, and lies over them.
    for panel in LOADED["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + right, place["y"] + down)
            for right in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_rows_that_are_zero_on_one_node_are_collapsed_and_last() -> None:
    rows = [panel for panel in LOADED["panels"] if panel["type"] == "row"]
    collapsed = [row["title"] for row in rows if row["collapsed"]]
    assert collapsed == [row["title"] for row in rows[-4:]]
    for row in rows:
        # Grafana wants the panels of a collapsed row in it, of an open one behind it.
        assert bool(row["panels"]) == row["collapsed"]
    inside = [query["expr"] for row in rows for each in row["panels"] for query in each["targets"]]
    several = "fetch|sent|read_seconds|disk|tenant|session|hidden"
    assert inside
    assert [text for text in inside if not re.search(several, text)] == []
    stats = [chart for chart in charts() if chart["type"] == "stat"]
    first = [query["expr"] for chart in stats for query in chart["targets"]]
    outside = set(make.expressions()) - {*inside, *first}
    assert [text for text in outside if re.search(several, text)] == []


def test_a_rate_is_of_a_second_and_a_share_at_most_all() -> None:
    for chart in charts():
        for text, unit in units(chart).items():
            is_rate = "rate(" in text and "histogram_quantile" not in text and " / " not in text
            assert is_rate == (unit in ("Bps", "cps") or unit.endswith("/s")), (text, unit)
            if not is_rate and " / " in text:
                assert unit == "percentunit", text
            elif wanted := unit_by_name(text):
                assert unit == wanted, text
        defaults = chart["fieldConfig"]["defaults"]
        assert (defaults["unit"] == "percentunit") == (defaults.get("max") == 1)


def test_every_query_parses_and_takes_rates_over_the_rate_interval() -> None:
    parser = pytest.importorskip("promql_parser")
    for text in make.expressions():
        assert set(re.findall(r"\[([^\]]*)\]", text)) <= {"$__rate_interval"}, text
        parser.parse(text.replace("$__rate_interval", "5m"))


def test_every_query_asks_for_metrics_that_exist_by_their_labels() -> None:
    for text in make.expressions():
        names = make.metrics_in(text)
        assert names, text
        known = [METRICS.get(name.removesuffix("_bucket")) for name in names]
        for name, metric in zip(names, known, strict=True):
            if metric is None:
                assert name.startswith(ENGINES), name
            else:
                assert name.endswith("_bucket") == (metric.kind is MetricKind.HISTOGRAM), name
        labels = {"cluster", "instance", "le"}.union(*(m.labels for m in known if m))
        if all(known):
            asked = re.findall(r"(?:by|on) \(([\w, ]+)\)", text)
            asked_for = {label.strip() for group in asked for label in group.split(",")}
            asked_for |= set(re.findall(r'(\w+)=~?"', text))
            assert asked_for <= labels, (text, asked_for - labels)


def test_every_metric_of_the_actors_is_on_the_dashboard() -> None:
    shown = {name.removesuffix("_bucket") for name in metrics_of_all_panels()}
    assert set(METRICS) <= shown, set(METRICS) - shown


def test_a_counter_is_only_looked_at_by_its_rate() -> None:
    for text in make.expressions():
        for name in make.metrics_in(text):
            if name.endswith("_total") and name != "raykv_quarantined_chunks_total":
                assert re.search(rf"rate\({name}[{{\[]", text), text
