"""Namespaces: who uses them, and how many are remembered."""

from __future__ import annotations

import pytest

import raykv.directory.known.spaces
from raykv.base.ids import Namespace, NodeId
from raykv.directory.known.spaces import LEFT_S, NamespaceUse
from raykv.protocol.node import MOST_NAMESPACES

A, B = NodeId("a"), NodeId("b")
NONE: frozenset[Namespace] = frozenset()


def spaces(*numbers: int) -> frozenset[Namespace]:
    return frozenset(Namespace(f"{number:04}") for number in numbers)


@pytest.fixture
def use() -> NamespaceUse:
    return NamespaceUse()


def test_namespace_is_left_for_a_while_after_its_last_engine(use: NamespaceUse) -> None:
    use.take(A, spaces(1), spaces(1, 2, 3), 0.0)
    use.take(B, spaces(1), NONE, 0.0)
    use.take(A, spaces(2), spaces(1, 2, 3), 5.0)
    assert not use.left(A, 5.0 + LEFT_S)
    use.lose(B, 6.0)
    assert not use.left(A, 5.9 + LEFT_S)
    assert use.left(A, 6.0 + LEFT_S) == ["0001"]
    use.take(B, spaces(1), NONE, 20.0)
    assert not use.left(A, 99.0)
    use.check()
    use.lose(A, 20.0)
    use.lose(B, 20.0)
    use.check()


def test_so_many_namespaces_are_remembered_and_told(
    use: NamespaceUse, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = spaces(*range(300))
    use.take(A, many, many, 0.0)
    assert use.alone(A) == sorted(many)[:MOST_NAMESPACES]
    use.take(A, NONE, many, 1.0)
    assert use.left(A, 99.0) == sorted(many)[:MOST_NAMESPACES]
    monkeypatch.setattr(raykv.directory.known.spaces, "MOST_LEFT", 10)
    monkeypatch.setattr(raykv.directory.known.spaces, "MOST_OF_A_NODE", 20)
    use.take(A, spaces(1), many, 2.0)
    assert len(use.left(A, 99.0)) == 0
    use.take(A, NONE, many, 3.0)
    use.check()
    # Of those that are remembered, those that count of the node.
    assert use.left(A, 99.0) == ["0001"]
