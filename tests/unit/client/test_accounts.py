"""What nodes say of their engines' requests, put together."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from raykv.base.errors import ClusterError
from raykv.client import accounts
from raykv.protocol.engine import MissRecord
from raykv.protocol.framing import encode
from raykv.protocol.reader import Explanation, Explanations, RequestPage
from raykv.protocol.status import MoreRoom
from tests.fixtures.played_cluster import play

PAGE = 2


def request(name: str, age_s: float) -> Explanation:
    return Explanation(MissRecord(name, 10, 0, 0), "e", "n", "ns", "tiny", age_s)


class Account:
    """A NodeActor's account of requests."""

    def __init__(self, *ended: Explanation, life: int = 1) -> None:
        self.life, self.ended = life, list(ended)

    def requests(self, after: int) -> bytes:
        found = self.ended[after : after + PAGE]
        return encode(RequestPage(self.life, after + 1, len(self.ended), found))


def ids(told: Any) -> list[str]:
    return [each.record.request_id for each in told.found]


def test_pages_of_all_nodes_have_each_request_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Account(*(request(f"a{at}", 10.0 - at) for at in range(5)))
    two = Account(request("b0", 8.5))
    nodes = {name: {"requests": each.requests} for name, each in (("one", one), ("two", two))}
    scheduler = play(monkeypatch, {}, nodes)
    page = accounts.requests(scheduler, "")
    assert ids(page) == ["a0", "a1", "b0"]
    assert page.following != page.last
    behind_all = page.last
    seen = ids(page)
    while page.following != page.last:
        page = accounts.requests(scheduler, page.following)
        seen += ids(page)
    assert seen == ["a0", "a1", "b0", "a2", "a3", "a4"]
    assert ids(accounts.requests(scheduler, behind_all)) == []
    two.ended.append(request("b1", 1.0))
    assert ids(accounts.requests(scheduler, behind_all)) == ["b1"]


def test_account_of_another_life_is_read_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Account(request("a0", 2.0), request("a1", 1.0))
    scheduler = play(monkeypatch, {}, {"one": {"requests": node.requests}})
    place = accounts.requests(scheduler, "").last
    node.life, node.ended = 2, [request("c0", 1.0)]
    assert ids(accounts.requests(scheduler, place)) == ["c0"]


def test_node_that_does_not_answer_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Account(request("a0", 2.0))
    scheduler = play(monkeypatch, {}, {"one": {"requests": node.requests}, "two": {}})
    with caplog.at_level(logging.WARNING, "raykv"):
        assert ids(accounts.requests(scheduler, "")) == ["a0"]
    assert "node two" in caplog.text
    scheduler = play(monkeypatch, {}, {"two": {}})
    with pytest.raises(ClusterError, match="not answer: node two"):
        accounts.requests(scheduler, "")


@pytest.mark.parametrize("place", ["x", "one:1", "one:a:b", "3"])
def test_what_is_no_place_is_refused(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    scheduler = play(monkeypatch, {}, {})
    with pytest.raises(ClusterError, match="requests after"):
        accounts.requests(scheduler, place)


def test_more_room_is_summed_over_nodes() -> None:
    told: dict[str, Any] = {"nodes": 1, "pool_bytes": 100, "prompt_tokens": 10}
    one = MoreRoom(**told, window_s=60.0, computed_tokens=5, more_bytes=[1, 2], saved_tokens=[1, 3])
    two = msgspec.structs.replace(one, window_s=90.0, saved_tokens=[0, 1], reach_bytes=7)
    both = accounts.summed([one, two])
    assert (both.nodes, both.pool_bytes, both.window_s) == (2, 200, 90.0)
    assert (both.prompt_tokens, both.saved_tokens, both.reach_bytes) == (20, [1, 4], 7)


def test_client_says_how_many_requests_are_known_when_it_is_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = {
        name: {"why_miss": lambda _, num=num: encode(Explanations([], num_known=num))}
        for name, num in (("one", 17), ("two", 3))
    }
    scheduler = play(monkeypatch, {}, nodes)
    with pytest.raises(ClusterError, match=r"'cmpl-9' is among the latest 20 that have ended"):
        accounts.why_miss(scheduler, "cmpl-9")
