"""Which nodes get a pool ahead of time, how it is cut, and which orders are refused."""

from __future__ import annotations

import pytest

from raykv.base.errors import SettingError
from raykv.cli.base import parse_duration
from raykv.client.pins import ordered
from raykv.node.wishes import RayNode, geometry_of, usual_nodes, wants
from raykv.protocol.operator import (
    MAX_ORDERED,
    NodeUp,
    PoolWish,
)

GPU = RayNode("a" * 56, "gpu", {"CPU": 8.0, "GPU": 2.0}, {"pool": "kv", "zone": "east"})
HEAD = RayNode("b" * 56, "head", {"CPU": 4.0, "GPU": 0.0})


@pytest.mark.parametrize(
    ("on", "named", "expected"),
    [
        ("all", [], [True, True]),
        ("GPU", [], [True, False]),
        ("CPU", [], [True, True]),
        ("TPU", [], [False, False]),
        ("pool=kv", [], [True, False]),
        ("pool=other", [], [False, False]),
        ("rack=7", [], [False, False]),
        ("GPU", [HEAD.node_id], [False, True]),
    ],
)
def test_nodes_are_meant_by_their_names_or_by_all_a_resource_or_a_label(
    on: str, named: list[str], expected: list[bool]
) -> None:
    assert [wants(PoolWish(on, named), node) for node in (GPU, HEAD)] == expected


def test_usual_nodes_are_those_with_a_gpu_if_there_are_any() -> None:
    assert usual_nodes([HEAD, GPU]) == "GPU"
    assert usual_nodes([HEAD]) == usual_nodes([]) == "all"


def test_pool_is_cut_so_that_large_chunks_fit() -> None:
    assert geometry_of(PoolWish(), 8 << 30).slab_bytes == 128 << 20
    assert geometry_of(PoolWish(), 1 << 30).slab_bytes == 64 << 20
    assert geometry_of(PoolWish(), 64 << 20).slab_bytes == 8 << 20
    assert geometry_of(PoolWish(slab_bytes=1 << 28), 1 << 30).slab_bytes == 1 << 28


def test_pool_is_ready_when_all_of_it_is_prefaulted_or_it_can_not_be() -> None:
    assert not NodeUp("n", "h").is_ready
    assert not NodeUp("n", "h", pool_bytes=8, prefaulted_bytes=4).is_ready
    assert NodeUp("n", "h", pool_bytes=8, prefaulted_bytes=8).is_ready
    assert NodeUp("n", "h", pool_bytes=8, error="no room").is_ready


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1.5h", 5400), (" 7 d ", 604_800)]
)
def test_duration_is_seconds_in_the_unit_that_is_named(text: str, seconds: float) -> None:
    assert parse_duration("--ttl", text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1w", "1h30m", "nan"])
def test_duration_is_refused_with_name_and_value(text: str) -> None:
    with pytest.raises(SettingError, match="--ttl="):
        parse_duration("--ttl", text)


def test_keys_are_bytes_or_hex_each_once() -> None:
    assert ordered(["00ff", b"\x00\xff", "01"]) == [b"\x00\xff", b"\x01"]


@pytest.mark.parametrize("keys", [[], ["xyz"], [""], ["00" * 129], ["00"] * (MAX_ORDERED + 1)])
def test_keys_that_are_none_are_refused(keys: list[bytes | str]) -> None:
    with pytest.raises(SettingError):
        ordered(keys)
