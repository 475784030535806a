"""The load of `raykv bench serve_routing`, and what is made of its answers."""

from __future__ import annotations

import pytest

from raykv.lab.bench import serve_routing
from raykv.lab.bench.conversations import Answered, ConversationLoad, Sums, conversations, sums


def test_each_turn_has_all_earlier_ones_as_its_beginning() -> None:
    first, second = conversations(ConversationLoad(2, 3, 20, 10, 4), seed=1)
    asked = []
    while not first.is_over:
        asked.append(first.ask())
        first.answered("yes")
    assert [len(messages) for messages in asked] == [2, 4, 6]
    assert asked[2][: len(asked[1])] == asked[1]
    assert asked[0][0] == second.messages[0]
    assert second.ask()[1] != asked[0][1]
    assert conversations(ConversationLoad(2, 3, 20, 10, 4), seed=1)[0].ask() == asked[0]


def test_sums_are_of_what_was_computed_and_of_the_slowest() -> None:
    found = sums([Answered(number / 100, 10, 4) for number in range(1, 201)])
    assert (found.computed, found.prompt_tokens) == (1200, 2000)
    assert found.mean_ttft_s == pytest.approx(1.005)
    assert found.p99_ttft_s == 1.98
    assert sums([Answered(3.0, 5, 5)]).p99_ttft_s == 3.0


def test_outcomes_are_read_off_a_scrape() -> None:
    text = """# TYPE ray_raykv_routed_requests_total counter
ray_raykv_routed_requests_total{deployment="model",outcome="placed",pid="1"} 3.0
ray_raykv_routed_requests_total{deployment="model",outcome="placed",pid="2"} 2.0
ray_raykv_routed_requests_total{deployment="model",outcome="not understood"} 1.0
ray_other{outcome="placed"} 9.0
"""
    assert serve_routing.counted(text) == {"placed": 5, "not understood": 1}


def test_each_router_is_measured_with_and_without_the_cache() -> None:
    measured = serve_routing.subjects()
    assert measured == [
        ("round_robin", True),
        ("prefix", True),
        ("kv", True),
        ("round_robin", False),
        ("prefix", False),
        ("power_of_two", False),
    ]
    load = ConversationLoad(2, 3, 20, 10, 4)
    made = serve_routing.rows(load, {"kv, with RayKV": [Sums(100, 200, 0.5, 1.0)]})
    assert [(row.subject, row.unit, row.values) for row in made] == [
        ("kv, with RayKV: computed", "tokens", (100.0,)),
        ("kv, with RayKV: mean time to first token", "s", (0.5,)),
        ("kv, with RayKV: p99", "s", (1.0,)),
    ]
