"""The places of an engine: the ranks of one pipeline stage on one node."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.base.ids import NodeId
from raykv.cluster.join import Raylet
from raykv.engine.listed import EnginePlace
from raykv.vllm.identity.placement import (
    HostNode,
    RankPlace,
    has_one_place,
    place_of_rank,
    places_of,
    refuse_spread,
)
from tests.fixtures.waiting import wait_until

PAGE = 4096


def said(rank: int, node: str = "", stage: int = 0, **more: Any) -> RankPlace:
    place = {"part_bytes": PAGE, "layers": f"of {stage}", "groups": [0], "free_bytes": 7}
    return RankPlace(node, rank=rank, stage=stage, **{**place, **more})


def ranks_at(places: list[EnginePlace]) -> list[tuple[str, tuple[int, ...]]]:
    return [(each.node_id, each.ranks) for each in places]


def test_ranks_of_a_node_are_a_place_in_their_order() -> None:
    places = places_of([said(2, "b"), said(0, "a"), said(3, "b"), said(1, "a")], 4, "own")
    assert ranks_at(places) == [("a", (0, 1)), ("b", (2, 3))]
    assert all(each.slot_bytes == {0: 2 * PAGE} for each in places)
    assert places[0].life != places[1].life, "a node may have both"
    assert places[0].free_bytes == 7


def test_each_pipeline_stage_is_a_place_of_its_own_on_one_node_too() -> None:
    """Its layers are others, and so may be its pages."""
    places = places_of([said(0), said(1, stage=1, part_bytes=3 * PAGE)], 2, "own")
    assert ranks_at(places) == [("own", (0,)), ("own", (1,))]
    assert [each.slot_bytes[0] for each in places] == [PAGE, 3 * PAGE]


def test_engine_at_one_place_is_named_as_ever() -> None:
    assert places_of([said(0, "a"), said(1, "a")], 2, "own") == [
        EnginePlace(NodeId("a"), free_bytes=7)
    ]


def test_part_is_named_by_its_ranks_and_layers_and_never_by_its_node() -> None:
    """So that it is found when the ranks are elsewhere, and not when the stages are cut anew."""

    def names(*ranks: RankPlace) -> list[str]:
        return [each.part for each in places_of(ranks, len(ranks), "own")]

    here = names(said(0, "a"), said(1, "b"))
    assert len({*here}) == 2
    assert names(said(0, "b"), said(1, "a")) == here
    assert names(said(0, "a"), said(1, "b", layers="others"))[1] != here[1]
    spread, together = (
        names(*(said(rank, "b" if rank in far else "a") for rank in range(4)))
        for far in ({3}, {1, 2, 3})
    )
    assert not {*spread} & {*together}, "of other shapes none is whole"


@pytest.mark.parametrize(
    ("ranks", "what"),
    [
        ([said(0)], "1 of 2 ranks of this engine have not said on which node they run"),
        ([said(0), said(1, why="no Ray node runs on host far")], "no Ray node runs on host far"),
        ([said(0), said(1, stage=1, lacks=[3])], "stage 1 has no layers of KV group 3"),
    ],
)
def test_engine_whose_places_are_not_known_or_not_whole_does_not_start(
    ranks: list[RankPlace], what: str
) -> None:
    with pytest.raises(SettingError, match=what):
        places_of(ranks, 2, "own")


@pytest.mark.parametrize(
    ("canonical", "connector", "what"),
    [
        (True, "RayKVConnector", "leave out canonical_layout"),
        (False, "RayKVHiddenStatesConnector", "hidden states are captured at one only"),
    ],
)
def test_what_needs_all_ranks_at_one_place_is_refused_by_name(
    canonical: bool, connector: str, what: str
) -> None:
    spec = SimpleNamespace(config=SimpleNamespace(canonical_layout=canonical))
    two = places_of([said(0, "a"), said(1, "b")], 2, "own")
    with pytest.raises(SettingError, match=f"are at 2 places .*{what}"):
        refuse_spread(two, spec, connector)
    refuse_spread(two[:1], spec, connector)


@pytest.mark.parametrize(
    ("stages", "hosts", "nodes", "is_one"),
    [
        (1, 1, set(), True),
        (1, 1, {"a"}, True),
        (1, 1, {"a", "b"}, False),
        (1, 1, None, False),
        (2, 1, {"a"}, False),
        (1, 2, set(), False),
    ],
)
def test_ranks_are_asked_where_they_are_unless_that_is_certain(
    stages: int, hosts: int, nodes: set[str] | None, is_one: bool
) -> None:
    config = SimpleNamespace(pipeline_parallel_size=stages, nnodes_within_dp=hosts)
    assert has_one_place(config, nodes) is is_one


@pytest.mark.parametrize(("stages", "says"), [(1, False), (2, True)])
def test_rank_that_vllm_has_started_here_is_silent_unless_there_are_several_stages(
    stages: int, says: bool
) -> None:
    """Beside a connector with a handshake of its own it must not take that one's."""
    sizes = SimpleNamespace(rank=1, world_size=2, pp_size=stages)
    group = SimpleNamespace(group_id=0, layer_names=["layer"])
    config = SimpleNamespace(parallel=sizes, groups=[group], worker_kv_bytes_per_block=PAGE)
    spec = SimpleNamespace(config=config, group_ids=[0], blocks_per_chunk=2)
    parallel = SimpleNamespace(pipeline_parallel_size=stages, nnodes_within_dp=1)
    place = place_of_rank(spec, parallel)
    if not says:
        assert place is None
        return
    assert place is not None
    assert (place.rank, place.stage, place.part_bytes) == (1, 1, 2 * PAGE)
    assert (place.node_id, place.lacks, place.groups) == ("", [], [0])


def raylet(node_id: str, address: str, *, is_own: bool = True) -> Raylet:
    return Raylet(node_id, address, 0.0, is_own=is_own)


@pytest.mark.parametrize(
    ("there", "address", "node_id", "why"),
    [
        ([raylet("a", "head:1")], "", "a", ""),
        ([raylet("a", "head:1"), raylet("b", "other:1", is_own=False)], "auto", "a", ""),
        ([raylet("a", "head:1"), raylet("b", "other:1")], "other:1", "b", ""),
        ([raylet("a", "head:1"), raylet("b", "other:1")], "", "", "2 Ray nodes run on host"),
        ([raylet("a", "head:1", is_own=False)], "", "", "no Ray node of this user runs on host"),
    ],
)
def test_rank_on_a_further_host_is_at_the_ray_node_there(
    there: list[Raylet], address: str, node_id: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.vllm.identity.placement.raylets", lambda: there)
    sizes = SimpleNamespace(rank=1, world_size=2, pp_size=1)
    group = SimpleNamespace(group_id=0, layer_names=["layer"])
    spec = SimpleNamespace(
        config=SimpleNamespace(parallel=sizes, groups=[group], worker_kv_bytes_per_block=PAGE),
        group_ids=[0],
        blocks_per_chunk=1,
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1, nnodes_within_dp=2)
    place = place_of_rank(spec, parallel, HostNode(address))
    assert place is not None
    assert place.node_id == node_id
    assert place.why.startswith(why)
    if why:
        with pytest.raises(SettingError, match=why):
            places_of([said(0), place], 2, "own")


def test_next_ray_node_of_a_further_host_is_found_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is anything lost where this host's processes can't be read, or not for a while."""
    own, later = raylet("a", "head:1"), Raylet("next", "head:1", 1.0)
    there, may_answer = [own], threading.Event()
    looks: list[int] = []

    def look() -> list[Raylet]:
        looks.append(len(looks))
        if len(looks) == 2:
            raise OSError("too many open files")
        if len(looks) > 2:
            may_answer.wait(10.0)
        return there

    monkeypatch.setattr("raykv.vllm.identity.placement.raylets", look)
    monkeypatch.setattr("raykv.vllm.identity.placement.LOOK_AGAIN_S", 0.0)
    host = HostNode("")
    there = [own, raylet("other", "else:1"), later]

    def is_looking() -> bool:
        assert host.now() == "a"
        return len(looks) > 2

    wait_until(is_looking, 10.0, "it is looked for again")
    assert host.now() == "a"
    may_answer.set()
    num_looks = len(looks)

    def has_looked_again() -> bool:
        assert host.now() == "a", "it is still there"
        return len(looks) > num_looks + 1

    wait_until(has_looked_again, 10.0, "it is looked for again")
    there = [later]
    wait_until(lambda: host.now() == "next", 10.0, "it is found")


@pytest.mark.parametrize("there", [[], [raylet("a", "head:1"), raylet("b", "other:1")]])
def test_host_without_one_ray_node_says_nothing(
    there: list[Raylet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.vllm.identity.placement.raylets", lambda: there)
    assert HostNode("").now() == ""
