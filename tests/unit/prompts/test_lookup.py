"""How much of a prompt can be loaded, and what is said of where its chunks are."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from msgspec.structs import replace

from raykv.base.errors import ClusterError, SettingError
from raykv.base.ids import Key
from raykv.prompts.block_hashes import DEFAULT_SEED, RANDOM, HashScheme, PromptTraits, seed_digest
from raykv.prompts.lookup import PromptScheme, choose_namespace, look_up, scheme_of
from raykv.prompts.prefixes import loadable_tokens
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.descriptions import ChunkGroup, groups_text, parse_groups
from raykv.protocol.reader import PromptLookup
from raykv.protocol.status import NamespaceStatus

FULL = ChunkGroup(0, 32)
WINDOW = ChunkGroup(1, 32, 2)
TRAITS = {
    "hash_algorithm": "sha256",
    "hash_seed": seed_digest(DEFAULT_SEED),
    "tokens_per_hash": "16",
    "chunks": "0:32",
}
SPACE = NamespaceStatus("5f0c", "/models/tiny", traits=TRAITS)
A, B = Source("a"), Source("b")
A_DISK, B_DISK = Source("a", SourceKind.DISK), Source("b", SourceKind.DISK)


def there(text: str) -> list[bool]:
    return [letter == "x" for letter in text]


@pytest.mark.parametrize(
    ("full", "window", "tokens"),
    [
        ("xxxx", "xxxx", 128),
        ("xxx.", "xxxx", 96),
        (".xxx", "xxxx", 0),
        ("xxxx", "..xx", 128),
        # Ends with the second: the third lacks a neighbour, the fourth the third.
        ("xxxx", "xx.x", 64),
        ("xxxx", "x...", 32),
        ("xxxx", "....", 0),
        ("", "", 0),
    ],
)
def test_prefix_ends_where_every_group_has_what_it_needs(
    full: str, window: str, tokens: int
) -> None:
    assert loadable_tokens([FULL, WINDOW], {0: there(full), 1: there(window)}) == tokens


def test_chunks_of_different_sizes_end_together() -> None:
    groups = [ChunkGroup(0, 32), ChunkGroup(1, 48)]
    assert loadable_tokens(groups, {0: there("xxxxx"), 1: there("xxx")}) == 96
    assert loadable_tokens(groups, {0: there("xx..."), 1: there("xxx")}) == 0


def test_groups_survive_being_a_text() -> None:
    assert groups_text([FULL, WINDOW]) == "0:32 1:32/2"
    assert parse_groups("0:32 1:32/2") == [FULL, WINDOW]


@pytest.mark.parametrize("text", ["", "0", "0:", "a:32", "0:32/x", "0:0", "-1:32", "0:32/0"])
def test_text_that_has_no_groups_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - Python's own words for no number
        parse_groups(text)


# Schemes


def with_traits(**changes: str) -> NamespaceStatus:
    return msgspec.structs.replace(SPACE, traits={**TRAITS, **changes})


def test_scheme_follows_from_traits() -> None:
    scheme = scheme_of(SPACE)
    assert scheme == PromptScheme(HashScheme("sha256", DEFAULT_SEED, 16), (FULL,))
    assert len(scheme.chunks(list(range(100)))[FULL]) == 3


def test_seed_of_the_environment_is_tried_too() -> None:
    space = with_traits(hash_seed=seed_digest("17"))
    assert scheme_of(space, ["17"]).hashing.seed == "17"
    for seeds in ([], ["18"]):
        with pytest.raises(SettingError, match="set PYTHONHASHSEED to what they have"):
            scheme_of(space, seeds)


def test_random_seed_is_refused_with_what_to_do() -> None:
    with pytest.raises(SettingError, match="start them with PYTHONHASHSEED=0"):
        scheme_of(with_traits(hash_seed=RANDOM))


@pytest.mark.parametrize(
    "changes",
    [{"chunks": ""}, {"chunks": "0:40"}, {"tokens_per_hash": "many"}, {"tokens_per_hash": "0"}],
)
def test_traits_that_say_too_little_are_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="is not known: no engine of it has been attached"):
        scheme_of(with_traits(**changes))
    with pytest.raises(ClusterError):
        scheme_of(NamespaceStatus("5f0c"))


# Namespaces


def test_namespace_is_chosen_by_model_or_beginning() -> None:
    other = NamespaceStatus("77ab", "/models/other")
    assert choose_namespace([SPACE], None, None) is SPACE
    assert choose_namespace([SPACE, other], "tiny", None) is SPACE
    assert choose_namespace([SPACE, other], "/models/other", None) is other
    assert choose_namespace([SPACE, other], None, "77") is other
    twin = NamespaceStatus("90", "/models/tiny")
    assert choose_namespace([SPACE, twin], "tiny", "90") is twin


def test_parts_of_an_engine_are_one_namespace_also_beside_whole_ones() -> None:
    parts = [replace(SPACE, namespace=f"5f0c/{at}.{at}.ab") for at in range(2)]
    for spaces in (parts, [*parts, SPACE]):
        for beginning in (None, "5f"):
            found = choose_namespace(spaces, None, beginning)
            assert (found.namespace, found.traits) == ("5f0c", SPACE.traits)


@pytest.mark.parametrize(
    ("spaces", "model", "beginning", "expected"),
    [
        ([], None, None, "no namespace in the cache: .* there are none"),
        ([SPACE, SPACE], None, None, "2 namespaces in the cache: name one with namespace="),
        ([SPACE], "big", None, r"no namespace of model 'big': .* 5f0c \(/models/tiny\)"),
        ([SPACE], None, "6", "no namespace that begins with '6'"),
    ],
)
def test_namespace_that_is_not_the_only_one_is_refused(
    spaces: list[NamespaceStatus], model: str | None, beginning: str | None, expected: str
) -> None:
    with pytest.raises(ClusterError, match=expected):
        choose_namespace(spaces, model, beginning)


# Lookups


def test_namespace_that_only_disks_have_is_chosen_where_there_is_no_other() -> None:
    old, new = NamespaceStatus("5f0c", "tiny"), NamespaceStatus("77ab", "tiny", engines=1)
    assert choose_namespace([old, new], None, None) is new
    assert choose_namespace([old, new], "tiny", None) is new
    assert choose_namespace([old, new], None, "5f") is old
    assert choose_namespace([old], None, None) is old


def found_at(there: list[set[Source]], extra_tokens: int = 0) -> PromptLookup:
    """A lookup of a prompt whose whole chunks are at these places."""
    tokens = list(range(32 * len(there) + extra_tokens))
    return look_up(SPACE, scheme_of(SPACE), tokens, PromptTraits(), lambda _: there)


def test_lookup_says_where_each_chunk_is_and_how_much_each_node_could_load() -> None:
    found = found_at([{A}, {A, A_DISK}, {B_DISK, A_DISK}, {B}, set()], extra_tokens=5)
    assert (found.model, found.prompt_tokens) == ("/models/tiny", 165)
    # What is on a disk can be loaded, and is told apart.
    assert (found.cached_tokens, found.disk_tokens) == (128, 32)
    assert [
        (each.node_id, each.tokens, each.chunks, each.tokens_with_disk, each.disk_chunks)
        for each in found.nodes
    ] == [("a", 64, 2, 96, 2), ("b", 0, 1, 0, 1)]
    assert [
        (each.first_token, each.end_token, each.nodes, each.disks) for each in found.chunks
    ] == [
        (0, 32, ["a"], []),
        (32, 64, ["a"], ["a"]),
        (64, 96, [], ["a", "b"]),
        (96, 128, ["b"], []),
        (128, 160, [], []),
    ]


def test_tokens_behind_a_gap_do_not_count_as_on_disk() -> None:
    found = found_at([{A_DISK}, set(), {A_DISK}])
    assert (found.cached_tokens, found.disk_tokens) == (32, 32)
    assert (found.nodes[0].tokens, found.nodes[0].tokens_with_disk) == (0, 32)


def test_chunks_before_a_window_are_not_read_from_a_disk() -> None:
    found, _ = looked_up((FULL, WINDOW), range(4 * 32), {0: "xxxx", 1: "dddx"})
    # The window is the last two chunks of four.
    assert (found.cached_tokens, found.disk_tokens) == (128, 32)


STATE = ChunkGroup(1, 32, 1)


def looked_up(
    groups: tuple[ChunkGroup, ...], tokens: Sequence[int], there: dict[int, str]
) -> tuple[PromptLookup, dict[ChunkGroup, list[Key]]]:
    """A lookup where `there` says, by group, which chunks node a has: x in its pool, d on disk."""
    states = frozenset({STATE.group} if STATE in groups else ())
    scheme = PromptScheme(HashScheme("sha256", DEFAULT_SEED, 16), groups, states)
    keys = scheme.chunks(tokens)
    places: dict[str, set[Source]] = {"x": {A}, "d": {A_DISK}, ".": set()}
    held = {
        key: places[letter]
        for group in groups
        for key, letter in zip(keys[group], there[group.group], strict=True)
    }
    found = look_up(
        SPACE, scheme, tokens, PromptTraits(), lambda asked: [held[Key(key)] for key in asked]
    )
    return found, keys


def needed(found: PromptLookup, group: ChunkGroup) -> list[int]:
    return [c.first_token // 32 for c in found.chunks if c.is_needed and c.group == group.group]


@pytest.mark.parametrize(
    ("group", "extra_tokens", "there", "cached"),
    [(STATE, 0, ".x.x", 64), (STATE, 1, ".x.x", 128), (WINDOW, 0, "..xx", 128)],
)
def test_state_behind_the_last_token_is_of_no_use_but_a_window_is(
    group: ChunkGroup, extra_tokens: int, there: str, cached: int
) -> None:
    """An engine computes that token, and a state is to be had where a chunk ends."""
    found, _ = looked_up((FULL, group), range(4 * 32 + extra_tokens), {0: "xxxx", 1: there})
    assert (found.cached_tokens, found.nodes[0].tokens) == (cached, cached)


def test_keys_are_those_of_whole_prefixes_and_of_windows_at_their_ends() -> None:
    found, keys = looked_up((FULL, WINDOW), range(8 * 32 + 5), {0: "xxxxxxxx", 1: "xxxx.xxx"})
    assert found.cached_tokens == 256
    assert found.keys == [*keys[FULL], *keys[WINDOW][6:]]
    # Loaded up to its fourth chunk, and once more is stored up to its eighth.
    found, keys = looked_up((FULL, WINDOW), range(8 * 32 + 5), {0: "xxxxxxxx", 1: "x.xx...x"})
    assert found.cached_tokens == 128
    assert needed(found, FULL) == [*range(8)]
    assert needed(found, WINDOW) == [2, 3, 6, 7]


def test_keys_of_a_prompt_that_is_nowhere_are_what_it_will_need() -> None:
    found, _ = looked_up((FULL, WINDOW), range(8 * 32 + 5), {0: "." * 8, 1: "." * 8})
    assert (needed(found, FULL), needed(found, WINDOW)) == ([*range(8)], [6, 7])
    # The prompt alone is loaded up to the chunk before its last token's, a longer one up to that.
    found, _ = looked_up((FULL, STATE), range(8 * 32), {0: "." * 8, 1: "." * 8})
    assert (needed(found, FULL), needed(found, STATE)) == ([*range(8)], [6, 7])


def test_other_salt_has_other_keys() -> None:
    scheme = scheme_of(SPACE)
    assert scheme.chunks([1] * 64) != scheme.chunks([1] * 64, PromptTraits(cache_salt="s"))
    assert scheme.chunks([1] * 31)[FULL] == []
