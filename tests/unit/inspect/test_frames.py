"""Frames of a cluster that is played, plots of them, and a recorder that follows it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("pandas")
pytest.importorskip("matplotlib")

import matplotlib as mpl

mpl.use("agg")

from matplotlib.axes import Axes

from raykv import inspect
from raykv.base.errors import ClusterError, SettingError
from raykv.base.ids import Key, Namespace, in_group
from raykv.client.cluster import Cluster
from raykv.inspect.frames import TABLES, frame
from raykv.inspect.sources import known_tokens
from raykv.inspect.traces import Trace
from raykv.protocol.engine import MissRecord
from raykv.protocol.events import BlockRemoved, BlockStored, Event, EventsMissed, NodeJoined
from raykv.protocol.reader import Chunk, EndedRequests, Explanation
from raykv.protocol.status import ClusterStatus, EngineStatus, NamespaceStatus
from raykv.stream.replay import Replay
from tests.fixtures.listed import listed
from tests.fixtures.played_cluster import status
from tests.fixtures.statuses import node
from tests.fixtures.waiting import wait_until

KEY = Key(bytes(range(32)) + b"\0\0\0\1")
SPACE = Namespace("space")
PAGE = 3
"""Requests in a page of the played cluster."""


def block(seq: int, kind: type[BlockStored | BlockRemoved] = BlockStored) -> Event:
    return kind(
        life=1, seq=seq, node_id="node", node_life=5, number=seq, namespace="space", key=KEY
    )


def told(number: int) -> Explanation:
    record = MissRecord(
        f"cmpl-{number}", 70, 6, 0, {"never_stored": 60, "incomplete_chunk": 4}, KEY, KEY[:16], 32
    )
    return Explanation(record, "engine", "node", "space", "tiny", age_s=2.0)


class PlayedCluster:
    """What `Cluster` answers, of a directory that changes when the test says so."""

    def __init__(self) -> None:
        self.log: list[Event] = [NodeJoined(life=1, seq=1, node_id="node", node_life=5, number=0)]
        self.told: list[Explanation] = []
        self.spaces: list[NamespaceStatus] = []
        self.tokens: dict[bytes, list[int]] = {}
        self.is_silent = False
        self.num_looks = 0

    def status(self) -> ClusterStatus:
        self.num_looks += 1
        if self.is_silent:
            raise ClusterError("the scheduler actor does not answer")
        return status(
            nodes=[node(100 * self.num_looks, life=5, node_id="node")],
            engines=[EngineStatus("engine", "node", "space", "tiny", 1, 0.1)],
            spaces=self.spaces,
        )

    def snapshot(self) -> Replay:
        replay = Replay()
        for event in self.log:
            replay.apply(event)
        return replay

    def chunks(self, *, namespace: str | None, node: str | None, tier: str) -> Iterator[Chunk]:
        assert tier == "ram"
        return listed(self.snapshot(), namespace, node)

    def tokens_of(self, keys: list[bytes], namespace: str) -> dict[bytes, Any]:
        assert namespace == "space"
        known = self.tokens.keys() & set(keys)
        return {key: SimpleNamespace(token_ids=self.tokens[key]) for key in known}

    def events(self, since: int | tuple[int, int], *, follow: bool) -> Iterator[Event]:
        assert not follow
        after = since if isinstance(since, int) else since[1]
        yield from [event for event in self.log if event.seq > after]

    def requests(self, after: str = "") -> EndedRequests:
        first = int(after or 0)
        found = self.told[first : first + PAGE]
        return EndedRequests(found, str(first + len(found)), str(len(self.told)))


@pytest.fixture
def played() -> PlayedCluster:
    return PlayedCluster()


@pytest.fixture
def cluster(played: PlayedCluster) -> Cluster:
    return cast("Cluster", played)


# Frames


@pytest.mark.parametrize("table", sorted(TABLES))
def test_empty_frame_has_its_columns_and_types(table: str) -> None:
    empty, one = frame(table, []), frame(table, [{}])
    documented = inspect.columns(table)
    for known in (empty, one):
        assert list(known.columns) == documented["column"].tolist()
        assert [str(each) for each in known.dtypes] == documented["dtype"].tolist()
    assert documented["meaning"].str.len().min() > 5


def test_columns_of_an_unknown_frame_are_refused() -> None:
    with pytest.raises(SettingError, match="no frame 'cats': there are chunks, nodes"):
        inspect.columns("cats")


def test_frames_of_a_cluster(played: PlayedCluster, cluster: Cluster) -> None:
    played.log.append(block(2))
    (chunk,) = inspect.chunks(cluster).itertuples(index=False)
    assert (chunk.namespace, chunk.node_id, chunk.group) == ("space", "node", 1)
    assert (chunk.key, chunk.bytes, chunk.age_s, chunk.hits) == (KEY.hex(), 4096, 1.5, 7)
    assert inspect.nodes(cluster)["pool_bytes"].tolist() == [100]
    (space,) = inspect.namespaces(cluster).itertuples(index=False)
    assert (space.namespace, space.model) == ("space", "tiny")
    assert (space.engines, space.nodes, space.chunks) == (1, 1, 1)
    assert inspect.transfers(cluster)["time_s"].notna().all()
    events = inspect.events(cluster)
    assert events["event"].tolist() == ["NodeJoined", "BlockStored"]
    assert events["key"].isna().tolist() == [True, False]
    assert (events["node_life"].tolist(), events["number"].tolist()) == ([5, 5], [0, 2])


def test_chunks_of_a_namespace_or_node_only(played: PlayedCluster, cluster: Cluster) -> None:
    played.log.append(block(2))
    assert len(inspect.chunks(cluster, namespace="sp", node="no")) == 1
    assert len(inspect.chunks(cluster, namespace="other")) == 0
    assert len(inspect.chunks(cluster, node="other")) == 0


def test_tokens_are_known_of_all_chunks_or_of_none(played: PlayedCluster, cluster: Cluster) -> None:
    assert known_tokens(cluster, SPACE, [KEY]) is None
    played.tokens = {KEY: [4, 5]}
    assert known_tokens(cluster, SPACE, [KEY, KEY]) == [4, 5, 4, 5]
    assert known_tokens(cluster, SPACE, [KEY, Key(b"other")]) is None


def test_tokens_of_a_window_are_those_of_full_attention_at_its_place(
    played: PlayedCluster, cluster: Cluster
) -> None:
    played.tokens = {KEY: [4, 5]}
    played.spaces = [NamespaceStatus("space", traits={"chunks": "1:32 2:32/3 3:64/3"})]
    assert known_tokens(cluster, SPACE, [in_group(KEY, 2)]) == [4, 5]
    assert known_tokens(cluster, SPACE, [in_group(KEY, 3)]) is None, "chunks of another size"


def test_requests_of_all_pages_in_order(played: PlayedCluster, cluster: Cluster) -> None:
    played.told = [told(number) for number in range(2 * PAGE + 1)]
    known = inspect.requests(cluster)
    assert known["request_id"].tolist() == [f"cmpl-{number}" for number in range(2 * PAGE + 1)]
    row = known.iloc[0]
    assert row["chunks"] == (KEY[:8].hex(), KEY[8:16].hex())
    assert (row["main_reason"], row["computed_tokens"]) == ("never_stored", 64)
    total = known["own_cache_tokens"] + known["loaded_tokens"] + known["computed_tokens"]
    assert (total == known["prompt_tokens"]).all()


# Recorder


def test_recorder_stamps_what_happens_after_its_start(
    played: PlayedCluster, cluster: Cluster
) -> None:
    played.log.append(block(2))
    played.told = [told(0)]
    with inspect.Recorder(cluster, pause_s=0.001) as recorder:
        played.log += [block(3), block(4, BlockRemoved)]
        played.told += [told(number) for number in range(1, 2 * PAGE)]
        wait_until(lambda: len(recorder.requests()) >= 2 * PAGE - 1, 10.0, "requests come")
        wait_until(lambda: len(recorder.transfers()) >= 2, 10.0, "nodes are looked at twice")
    assert recorder.events()["seq"].tolist() == [3, 4]
    assert recorder.events()["time_s"].is_monotonic_increasing
    assert recorder.chunks_at_start()["key"].tolist() == [KEY.hex()]
    expected = [f"cmpl-{number}" for number in range(1, 2 * PAGE)]
    assert recorder.requests()["request_id"].tolist() == expected
    rates = inspect.transfer_rates(recorder.transfers())
    assert rates["bytes_stored"].min() > 0
    looks = played.num_looks
    recorder.stop()
    assert played.num_looks == looks


def test_recorder_outlives_silence_and_missed_events(
    played: PlayedCluster, cluster: Cluster
) -> None:
    played.told = [told(0), told(1)]
    with inspect.Recorder(cluster, pause_s=0.001) as recorder:
        played.is_silent = True
        wait_until(lambda: bool(recorder.errors), 10.0, "it notices")
        played.is_silent = False
        played.told.append(told(7))
        played.log.append(EventsMissed(life=1, seq=9, missed=5))
        wait_until(lambda: len(recorder.requests()) == 1, 10.0, "the next request comes")
    assert recorder.requests()["request_id"].tolist() == ["cmpl-7"]
    assert "does not answer" in recorder.errors[0]
    assert recorder.events()["missed"].tolist()[0] == 5


def test_recorder_of_a_cluster_that_is_not_there_is_refused(
    played: PlayedCluster, cluster: Cluster
) -> None:
    def nobody() -> Replay:
        raise ClusterError("RayKV does not run")

    played.snapshot = nobody  # type: ignore[method-assign]
    with pytest.raises(ClusterError, match="does not run"):
        inspect.Recorder(cluster)


# Plots

TRACE = Trace([[0, 1], [0, 2, 3], [4]], [2, 2, 1], 32)


def plots(chunks: Any, events: Any, requests: Any, transfers: Any, trace: Trace) -> list[Axes]:
    return [
        inspect.plot_heat_map(chunks),
        inspect.plot_occupancy(inspect.occupancy(events)),
        inspect.plot_ages_at_eviction(inspect.ages_at_eviction(events)),
        inspect.plot_sources(requests),
        inspect.plot_transfers(inspect.transfer_rates(transfers)),
        inspect.plot_prefix_tree(inspect.prefix_tree(trace)),
        inspect.plot_reuse_distances(inspect.reuse_distances(trace, 1 << 20)),
        inspect.plot_sizing(inspect.sizing(trace, 1 << 20), pool_bytes=1 << 21),
    ]


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def drawn(axes: Axes) -> int:
    return len(axes.lines) + len(axes.patches) + len(axes.images) + len(axes.collections)


def test_every_plot_draws_what_its_frame_has_and_says_in_which_unit(
    played: PlayedCluster, cluster: Cluster
) -> None:
    played.log += [block(2), block(3, BlockRemoved), block(4)]
    played.told = [told(0), told(1)]
    amounts = {"bytes_loaded": 0, "bytes_fetched": 0, "bytes_sent": 0}
    moved = frame(
        "transfers",
        [{"time_s": at, "node_id": "node", "bytes_stored": at, **amounts} for at in (1, 2, 3)],
    )
    chunks, events = inspect.chunks(cluster), inspect.events(cluster)
    for axes in plots(chunks, events, inspect.requests(cluster), moved, TRACE):
        assert drawn(axes) > 0, axes.get_title()
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel()
        axes.figure.canvas.draw()


def test_plots_of_nothing_say_so_instead_of_empty_axes() -> None:
    import matplotlib.pyplot as plt

    chunks, events, requests, transfers = (
        frame(table, []) for table in ("chunks", "events", "requests", "transfers")
    )
    _, given = plt.subplots()
    assert inspect.plot_sources(requests, ax=given) is given
    for axes in [given, *plots(chunks, events, requests, transfers, Trace([], [], 32))]:
        assert drawn(axes) == 0
        assert [text.get_text().partition(":")[0] for text in axes.texts] == ["nothing yet"]
        assert not axes.axison
        axes.figure.canvas.draw()


def test_curve_of_sizes_is_seen_beside_a_pool_that_is_far_larger() -> None:
    sizes = inspect.sizing(TRACE, 1 << 20)
    far = inspect.plot_sizing(sizes, pool_bytes=1 << 30)
    assert (far.get_xscale(), far.get_xlabel()) == ("log", "pool in MiB")
    assert inspect.plot_sizing(sizes, pool_bytes=1 << 21).get_xscale() == "linear"


def test_children_lie_within_their_parents_height() -> None:
    axes: Any = inspect.plot_prefix_tree(inspect.prefix_tree(TRACE))
    (bars,) = axes.collections
    corners = [path.get_extents().extents.tolist() for path in bars.get_paths()]
    found = {(left, low): high - low for left, low, _, high in corners}
    # Chunk 0 was used twice, 1 and 2 follow it once each; 4 is a head of its own.
    assert found == {(0, 0): 2, (1, 0): 1, (1, 1): 1, (0, 2): 1}


# Imports


def test_missing_package_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SettingError, match=r"pip install '\.\[inspect\]' in a clone"):
        frame("chunks", [])


def test_all_public_names_are_there() -> None:
    assert all(getattr(inspect, name).__doc__ for name in inspect.__all__)
