"""Which replica a request goes to, and what is remembered of where requests went."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import SettingError
from raykv.base.ids import Key
from raykv.serve.router.rank import Candidate, PromptPlace, RecentPrompts, Weights, rank

WEIGHTS = Weights(load=0.05, fetch=0.25, request=256)
A, B, C = Candidate("a", "node1"), Candidate("b", "node2"), Candidate("c", "node2")


def place(held: dict[str, int] | None = None, **on_nodes: int) -> PromptPlace:
    return PromptPlace(4096, on_nodes, max(on_nodes.values(), default=0), held or {})


def order(*replicas: Candidate, at: PromptPlace, weights: Weights = WEIGHTS) -> str:
    return "".join(choice.name for choice in rank(replicas, at, weights))


def test_request_goes_where_its_prompt_is() -> None:
    assert order(A, B, at=place(node2=4096)) == "ba"
    assert order(A, B, at=place(node1=2048, node2=1024)) == "ab"


def test_two_replicas_on_a_node_share_its_pool_and_the_less_loaded_one_is_taken() -> None:
    assert order(A, replace(B, load=1), C, at=place(node2=4096)) == "cba"


def test_queue_that_costs_more_than_a_fetch_is_avoided() -> None:
    # 0.2 of 4096 tokens: three requests are less, four are more.
    assert order(A, replace(B, load=3), at=place(node2=4096)) == "ba"
    assert order(A, replace(B, load=4), at=place(node2=4096)) == "ab"


def test_cache_of_vllm_itself_comes_before_the_pool_of_its_node() -> None:
    assert order(B, C, at=place(node2=4096, held={"c": 4096})) == "cb"


def test_burst_stays_together_until_its_queue_costs_more_than_computing() -> None:
    here = place(held={"a": 4096})
    assert order(replace(A, load=15), B, at=here) == "ab"
    assert order(replace(A, load=17), B, at=here) == "ba"


def test_tie_goes_to_the_least_loaded_then_to_the_one_with_the_fewest_requests() -> None:
    none = Weights(request=0)
    assert order(replace(A, load=2), B, at=place(), weights=none) == "ba"
    assert order(replace(A, sent=5), replace(B, sent=4), at=place()) == "ba"
    assert order(C, B, A, at=place()) == "abc"


def test_work_that_waits_is_avoided_but_not_at_the_price_of_computing_twice() -> None:
    here = place(held={"a": 4096})
    assert order(replace(A, waiting=11_000), B, at=here) == "ab"
    assert order(replace(A, waiting=12_000), B, at=here) == "ba"


@pytest.mark.parametrize(
    ("load", "fetch", "request_"),
    [(0.5, 0.1, 1), (-0.1, 0.2, 1), (0.1, 1.1, 1), (0, 0, -1), (0, 0, float("nan"))],
)
def test_weights_that_cannot_be_meant_are_refused(
    load: float, fetch: float, request_: float
) -> None:
    with pytest.raises(SettingError, match="routing weight"):
        Weights(load=load, fetch=fetch, request=request_)


NODES = ["n0", "n1", "n2"]
REPLICAS = st.lists(
    st.builds(
        Candidate,
        st.sampled_from([f"r{n}" for n in range(6)]),
        st.sampled_from(NODES),
        st.integers(0, 40),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda each: each.name,
)
COUNTS = st.integers(0, 5000)
PLACES = st.builds(
    PromptPlace,
    st.integers(1, 5000),
    st.dictionaries(st.sampled_from(NODES), COUNTS),
    COUNTS,
    st.dictionaries(st.sampled_from([f"r{n}" for n in range(6)]), COUNTS),
)
SOME = st.builds(
    lambda a, b, request: Weights(load=min(a, b), fetch=max(a, b), request=request),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1000),
)


@given(REPLICAS, PLACES, SOME, st.randoms(use_true_random=False))
def test_order_has_each_replica_once_and_not_the_order_in_which_they_came(
    replicas: list[Candidate], at: PromptPlace, weights: Weights, random: object
) -> None:
    choices = rank(replicas, at, weights)
    assert sorted(choice.name for choice in choices) == sorted(each.name for each in replicas)
    assert [c.cost for c in choices] == sorted(c.cost for c in choices)
    assert choices[0].cost >= 0
    assert rank(replicas[::-1], at, weights) == choices


@given(REPLICAS, PLACES, SOME)
def test_more_work_or_less_of_the_prompt_never_makes_a_replica_cheaper(
    replicas: list[Candidate], at: PromptPlace, weights: Weights
) -> None:
    def cost_of(first: Candidate, where: PromptPlace) -> float:
        ranked = rank([first, *replicas[1:]], where, weights)
        return next(choice.cost for choice in ranked if choice.name == first.name)

    first = replicas[0]
    before = cost_of(first, at)
    assert cost_of(replace(first, load=first.load + 1), at) >= before
    less = replace(at, on_nodes={}, held={})
    assert cost_of(first, less) >= before - 1e-6
    nowhere = replace(at, anywhere=0)
    assert cost_of(first, nowhere) >= before - 1e-6


def keys(text: str) -> list[Key]:
    """A chunk's key says all that comes before it."""
    return [Key(text[: n + 1].encode()) for n in range(len(text))]


def test_recent_prompt_is_held_as_far_as_it_is_the_same() -> None:
    recent = RecentPrompts(30.0)
    recent.remember("a", keys("abcd"), 0.0)
    recent.remember("b", keys("ab"), 1.0)
    assert recent.num_held(keys("abcx"), 2.0) == {"a": 3, "b": 2}
    assert recent.num_held(keys("xbcd"), 2.0) == {}


def test_recent_prompt_is_forgotten_after_its_time() -> None:
    recent = RecentPrompts(30.0)
    recent.remember("a", keys("abcd"), 0.0)
    recent.remember("b", keys("ab"), 20.0)
    assert recent.num_held(keys("abcd"), 30.0) == {"b": 2}
    recent.remember("a", keys("ab"), 31.0)
    assert recent.num_held(keys("abcd"), 32.0) == {"b": 2, "a": 2}


@given(
    st.lists(st.tuples(st.sampled_from("pqr"), st.text("ab", max_size=6)), max_size=20),
    st.text("ab", max_size=6),
    st.integers(1, 12),
)
def test_memory_is_bounded_and_says_nothing_that_was_not_sent(
    sent: list[tuple[str, str]], asked: str, most: int
) -> None:
    recent = RecentPrompts(10.0, most)
    for replica, text in sent:
        recent.remember(replica, keys(text), 0.0)
        assert len(recent) <= most
    truth: dict[str, int] = {}
    for replica, text in sent:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, asked, strict=False))
        truth[replica] = max(truth.get(replica, 0), len([*same]))
    found = recent.num_held(keys(asked), 0.0)
    assert all(0 < count <= truth[replica] for replica, count in found.items())
    if len({text[:n] for _, text in sent for n in range(1, 7)}) <= most:
        assert found == {replica: count for replica, count in truth.items() if count}
