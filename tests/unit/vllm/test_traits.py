"""What an engine says of its namespace: short, complete, without secrets."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from raykv.client.cluster import WHOLE_NAMESPACE
from raykv.vllm.identity.facts import namespace_of, traits_of
from raykv.vllm.identity.readers import RANDOM_SEED

FACTS: dict[str, Any] = {
    "config": {"layers": 4, "words": list(range(30))},
    "weights": "dummy",
    "weights_version": "2",
    "dtype": "torch.float32",
    "kv_groups": [["spec", [f"layer.{number}" for number in range(30)]]],
    "blocks_per_chunk": 4,
    "hash_algorithm": "sha256",
    "hash_seed": "secret",
}


def test_every_fact_is_a_short_trait() -> None:
    traits = traits_of(FACTS)
    assert traits["dtype"] == "torch.float32"
    assert traits["blocks_per_chunk"] == "4"
    assert traits["weights"] == "dummy"
    assert set(traits) == set(FACTS)
    assert max(map(len, traits.values())) <= 64


def test_long_fact_shows_which_of_its_fields_are_on() -> None:
    fields = dict.fromkeys(["one", "two", "three", "four", "five"], False)
    long = {name * 3: value for name, value in fields.items()}
    traits = [traits_of({**FACTS, "window": {**long, "six": on}})["window"] for on in (1, 2, None)]
    assert [trait.partition(" #")[0] for trait in traits] == ['{"six": 1}', '{"six": 2}', "{}"]
    # What is off in another way is told apart by the digest.
    other = traits_of({**FACTS, "window": {**long, "six": False}})["window"]
    assert len({*traits, other}) == 4


def test_seed_is_told_as_a_digest_only() -> None:
    assert "secret" not in str(traits_of(FACTS))
    other = traits_of({**FACTS, "hash_seed": "other"})
    assert other["hash_seed"] != traits_of(FACTS)["hash_seed"]


def test_random_seed_is_told_as_such() -> None:
    facts = {**FACTS, "hash_algorithm": "xxhash", "hash_seed": f"{RANDOM_SEED}engine-1"}
    assert traits_of(facts)["hash_seed"] == "random"


@pytest.mark.parametrize(
    "changed",
    [{"kv_groups": [["other", []]]}, {"config": {"layers": 5, "words": list(range(30))}}],
)
def test_any_difference_of_facts_is_one_of_traits(changed: dict[str, Any]) -> None:
    assert traits_of({**FACTS, **changed}) != traits_of(FACTS)


def test_namespace_is_known_for_a_whole_one_by_its_digits() -> None:
    whole = namespace_of(FACTS)
    assert WHOLE_NAMESPACE.fullmatch(whole)
    assert not WHOLE_NAMESPACE.fullmatch(whole[:-1])
