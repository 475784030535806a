"""What a router is told of prompts, beside the rule for one prompt on one node."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import MessageError
from raykv.directory.answers import prefix_page
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.protocol import reader
from raykv.protocol.descriptions import ChunkGroup, groups_text
from tests.fixtures.directory.reporting import SPACE, ReportingNode, key_of, row_of

NODES = ["n0", "n1", "n2"]
GROUPS = st.lists(
    st.tuples(st.sampled_from([2, 3, 4]), st.none() | st.integers(1, 3)), min_size=1, max_size=3
).map(lambda some: [ChunkGroup(n, tokens, window) for n, (tokens, window) in enumerate(some)])


def loadable(groups: list[ChunkGroup], is_there: dict[int, list[bool]]) -> int:
    """Tokens of the longest prefix of which each group has what it needs."""
    longest = max(len(is_there[each.group]) * each.tokens for each in groups)
    for end in range(longest, 0, -1):
        needed = []
        for each in groups:
            count, rest = divmod(end, each.tokens)
            first = 0 if each.window is None else max(0, count - each.window)
            some = is_there[each.group]
            needed.append(not rest and count <= len(some) and all(some[first:count]))
        if all(needed):
            return end
    return 0


@given(GROUPS, st.lists(st.integers(0, 20), min_size=1, max_size=3), st.data())
def test_each_node_is_said_to_have_what_could_be_loaded_from_it(
    groups: list[ChunkGroup], lengths: list[int], data: st.DataObject
) -> None:
    counts = [length // group.tokens for length in lengths for group in groups]
    total = sum(counts)
    has = [
        data.draw(st.lists(st.sampled_from([True, True, False]), min_size=total, max_size=total))
        for _ in NODES
    ]
    directory = Directory(1, Orders(None, 1, 0.0))
    for node, some in zip(NODES, has, strict=True):
        rows = [row_of(number) for number, is_there in enumerate(some) if is_there]
        ReportingNode(directory, node).report(0.0, *rows)
    keys: list[bytes] = [key_of(number) for number in range(total)]
    query = reader.PrefixQuery(SPACE, groups_text(groups), keys, counts)
    page = prefix_page(directory, query)
    reader.check_prefix_page(page, len(lengths))

    def expected(there: list[bool]) -> list[int]:
        tokens, first = [], 0
        for prompt in range(len(lengths)):
            parts = {}
            for number, group in enumerate(groups):
                count = counts[prompt * len(groups) + number]
                parts[group.group] = there[first : first + count]
                first += count
            tokens.append(loadable(groups, parts))
        return tokens

    by_node = {node: expected(some) for node, some in zip(NODES, has, strict=True) if any(some)}
    assert page.nodes == list(by_node)
    assert page.tokens == [by_node[n][p] for p in range(len(lengths)) for n in page.nodes]
    assert page.anywhere == expected([any(some) for some in zip(*has, strict=True)])


@pytest.mark.parametrize(
    "page",
    [
        reader.PrefixPage(["n"], [1], [1]),
        reader.PrefixPage(["n"], [1], [1, 2]),
        reader.PrefixPage(["n"], [1, -1], [1, 2]),
        reader.PrefixPage(["n"], [1, 1], [1, -2]),
    ],
    ids=str,
)
def test_answer_that_cannot_be_meant_is_refused(page: reader.PrefixPage) -> None:
    with pytest.raises(MessageError):
        reader.check_prefix_page(page, 2)
