"""The command line against a real cluster; RayKV's actors without an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from raykv.base.errors import ClusterError, MessageError, SettingError
from raykv.base.ids import Key
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.cluster import join as clusters
from raykv.metrics.discovery import default_path
from raykv.node.launch import KEEP_GPUS, node_actor
from raykv.prompts.block_hashes import (
    DEFAULT_SEED,
    HashScheme,
    PromptTraits,
    block_hashes,
    chunk_keys,
    seed_digest,
)
from raykv.protocol.columns import Keys, Texts
from raykv.protocol.engine import FoundKeys, MissRecord
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures import played_engine
from tests.fixtures.one_node import actors_of_one_node
from tests.fixtures.played_engine import PlayedEngine
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Both actors, as an engine's start makes them."""
    with actors_of_one_node(cluster, POOL_BYTES):
        yield cluster


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_status_says_what_is_missing_without_raykv(cluster: Cluster) -> None:
    cluster.down()
    with pytest.raises(ClusterError, match="RayKV does not run in the Ray cluster at"):
        cluster.status()


def test_ray_is_told_not_to_hide_gpus_from_the_node(running: Cluster) -> None:
    """It asks for none and serves all of them."""
    pid = running.status().nodes[0].pid
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    assert f"{KEEP_GPUS}=1".encode() in environment


def test_status_shows_node_and_pool(running: Cluster) -> None:
    wait_until(
        lambda: running.status().nodes[0].prefaulted_bytes == POOL_BYTES, 20.0, "prefaulting ends"
    )
    data = json.loads(run("status", "--json"))
    assert data["nodes"][0]["pool_bytes"] == POOL_BYTES
    assert data["paused"] is False
    text = run("status")
    assert "64.0 MiB" in text
    assert "100 %" in text


def test_targets_of_prometheus_are_beside_rays_own(running: Cluster) -> None:
    path = default_path()
    assert path is not None

    def are_told() -> bool:
        # A node says where its metrics are with one of its reports.
        targets = [running.status().metrics, running.status().nodes[0].metrics]
        is_written = path.exists() and json.loads(path.read_text())[0]["targets"] == targets
        return all(targets) and is_written

    wait_until(are_told, 20.0, f"{path} has both")
    assert path.parent.name.startswith("session_")


def test_pause_is_seen_and_outlives_scheduler_actor(running: Cluster) -> None:
    run("pause")
    assert running.status().paused
    life = running.status().life
    ray.kill(ray.get_actor("scheduler", namespace="raykv"), no_restart=False)

    def is_back() -> bool:
        try:
            status = running.status()
        except ClusterError:
            return False
        return status.life > life and bool(status.nodes)

    wait_until(is_back, 60.0, "the scheduler actor is back")
    assert running.status().paused
    run("resume")
    assert not running.status().paused


def test_request_that_has_ended_is_explained_by_the_beginning_of_its_id(running: Cluster) -> None:
    node_id = clusters.resolve_node_id("")
    engine = PlayedEngine(node_id, "played", "ns", num_blocks=None, model="model")
    record = MissRecord("cmpl-7-0-abcd", 100, 30, 20, {"evicted": 50}, b"key" + bytes(4))
    engine.tell(finished=[record])
    engine.hear()
    (row,) = json.loads(run("explain", "cmpl-7", "--json"))
    assert row["missed_tokens"] == {"evicted": 50}
    assert row["node_id"] == node_id
    assert "computed: evicted" in run("explain", "cmpl-7-0-abcd")
    with pytest.raises(ClusterError, match="among the latest 1 that have ended"):
        running.why_miss("cmpl-8")
    engine.end()


# Looking at chunks


SALTED = PromptTraits(cache_salt="tenant")
PROMPT = list(range(100, 100 + 70))
SCHEME = HashScheme("sha256", DEFAULT_SEED, 16)


class LookedAt(PlayedEngine):
    """An engine that has stored four chunks of a prompt, and found the second one again."""

    def __init__(self) -> None:
        traits = {
            "hash_algorithm": "sha256",
            "hash_seed": seed_digest(DEFAULT_SEED),
            "tokens_per_hash": "16",
            "chunks": "0:16",
        }
        node_id = clusters.resolve_node_id("")
        super().__init__(node_id, "looked-at", "abcd", model="/m/tiny", traits=traits)
        self.keys = [Key(key) for key in chunk_keys(block_hashes(PROMPT, SCHEME, SALTED), 1, 0)]
        assert self.store(self.keys) == 4
        found = FoundKeys(Keys.of([self.keys[1]]), Texts.of([""]))
        self.tell(found=found, counters={"prompt_tokens": 100, "loaded_tokens": 25})
        self.hear()


@pytest.fixture(scope="module")
def played(running: Cluster) -> Iterator[LookedAt]:
    made = LookedAt()

    def are_known() -> bool:
        status = running.status()
        return bool(status.engines) and sum(node.chunks for node in status.nodes) == 4

    wait_until(are_known, 10.0, "the directory knows of them")
    yield made
    made.end()


def test_ls_lists_what_is_held(played: LookedAt) -> None:
    rows = json.loads(run("chunk", "ls", "--json", "--node", played.node_id))
    assert [row["key"] for row in rows] == [key.hex() for key in played.keys]
    assert {row["model"] for row in rows} == {"/m/tiny"}
    assert all(0 <= row["age_s"] < 60 for row in rows)
    (first,) = json.loads(run("chunk", "ls", "--json", "--sort", "hits", "--limit", "1"))
    assert (first["key"], first["hits"]) == (played.keys[1].hex(), 1)
    text = run("chunk", "ls", "--namespace", "ab")
    assert played.keys[3].hex()[:24] in text
    assert "4.0 KiB" in text


def test_ls_of_nothing_ends_with_1(played: LookedAt) -> None:
    assert run("chunk", "ls", "--group", "3", code=1) == "no chunks\n"
    assert json.loads(run("chunk", "ls", "--group", "3", "--json", code=1)) == []


def test_show_tells_who_has_a_chunk(played: LookedAt) -> None:
    key = played.keys[1].hex()
    (row,) = json.loads(run("chunk", "show", key, "--json"))
    assert (row["key"], row["node_id"], row["num_bytes"]) == (key, played.node_id, 4096)
    assert f"node {played.node_id}: 4.0 KiB" in run("chunk", "show", key[:10])
    assert "no node has a chunk" in run("chunk", "show", "ff" * 36, code=1)


def test_lookup_says_how_much_of_a_prompt_is_where(played: LookedAt) -> None:
    tokens = ",".join(map(str, [*PROMPT[:40], *[7] * 50]))
    arguments = ("--form", "tokens", "--model", "tiny", "--trait", "cache_salt=tenant")
    found = json.loads(run("chunk", "lookup", tokens, *arguments, "--json"))
    assert (found["prompt_tokens"], found["cached_tokens"]) == (90, 32)
    assert [(node["node_id"], node["tokens"]) for node in found["nodes"]] == [(played.node_id, 32)]
    assert [len(chunk["nodes"]) for chunk in found["chunks"]] == [1, 1, 0, 0, 0]
    assert "32 of 90 tokens can be loaded" in run("chunk", "lookup", tokens, *arguments)
    plain = run("chunk", "lookup", tokens, "--form", "tokens", "--namespace", "abcd", code=1)
    assert "0 of 90 tokens can be loaded" in plain


def test_status_and_top_show_namespaces_and_rates(played: LookedAt) -> None:
    assert "/m/tiny" in run("status")
    (space,) = [s for s in json.loads(run("status", "--json"))["spaces"] if s["chunks"]]
    assert (space["namespace"], space["num_bytes"]) == ("abcd", 4 * 4096)
    found = json.loads(run("top", "--json", "--interval", "0.1"))
    assert found["progress"]["seconds"] >= 0.1
    assert played.node_id in found["progress"]["transfers"]
    text = run("top", "--once", "--interval", "0.1")
    assert "loaded by RayKV" in text
    assert "25 %" in text


def test_events_are_lines_of_json_from_a_place_on(played: LookedAt) -> None:
    rows = [json.loads(line) for line in run("events", "--json").splitlines()]
    stored = [row for row in rows if row["event"] == "BlockStored"]
    assert [row["key"] for row in stored] == [key.hex() for key in played.keys]
    place = f"{stored[1]['life']}:{stored[1]['seq']}"
    later = [json.loads(line) for line in run("events", "--json", "--since", place).splitlines()]
    assert [row["seq"] for row in later][:2] == [stored[2]["seq"], stored[3]["seq"]]
    assert f"{place} BlockStored node_id={played.node_id}" in run("events")


def test_session_is_listed_shown_paused_and_ended(played: LookedAt) -> None:
    assert run("session", "ls", code=1).startswith("no sessions")
    news = [
        SessionNews("agent", SessionWord.CAME),
        SessionNews("agent", SessionWord.USED, Keys.of(played.keys[:3])),
        SessionNews("other", SessionWord.USED, Keys.of(played.keys[:1])),
    ]
    played.tell(sessions=news)
    played.hear()
    rows = json.loads(run("session", "ls", "--json", "--namespace", "ab"))
    assert [row["session"] for row in rows] == ["other", "agent"]
    assert "agent" in run("session", "ls")
    shown = json.loads(run("session", "show", "agent", "--json"))
    assert (shown["chunks"], shown["private_chunks"], shown["requests"]) == (3, 2, 1)
    assert (shown["stage"], shown["in_pools"]) == ("active", {played.node_id: 3})
    assert f"node {played.node_id[:12]}: 3 of them in its pool" in run("session", "show", "agent")
    assert "paused, 30 s left" in run("session", "pause", "agent", "30s", "--priority", "3")
    assert json.loads(run("pin", "ls", "--json"))["client_chunks"] == 3
    ended = json.loads(run("session", "over", "agent", "--json"))
    assert ended["stage"] == "over"
    assert json.loads(run("pin", "ls", "--json"))["client_chunks"] == 0
    with pytest.raises(ClusterError, match="there is no session 'nobody'"):
        run("session", "show", "nobody")
    with pytest.raises(SettingError, match="at most 3600"):
        run("session", "pause", "agent", "2h")


def test_session_whose_chunks_are_there_needs_no_prefetch(played: LookedAt) -> None:
    played.tell(sessions=[SessionNews("here", SessionWord.USED, Keys.of(played.keys))])
    played.hear()
    found = json.loads(run("session", "prefetch", "here", "--json"))
    assert (found["asked"], found["there"], found["failed"]) == (4, 4, 0)
    by_engine = run("session", "prefetch", "here", "--to", "looked-at")
    assert "4 were there already" in by_engine


def test_every_command_that_changes_something_tells_it_as_json(played: LookedAt) -> None:
    assert json.loads(run("pause", "--json")) == {"paused": True}
    assert json.loads(run("resume", "--json")) == {"paused": False}
    assert json.loads(run("clear", "abcd", "--json")) == {"cleared": "abcd"}
    assert json.loads(run("chunk", "ls", "--json", code=1)) == []


def test_what_ray_says_of_errors_goes_to_the_log_and_not_to_standard_output(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    from ray._private.utils import publish_error_to_driver
    from ray._private.worker import global_worker

    with caplog.at_level("INFO", "raykv.ray"):
        publish_error_to_driver("test", "a played error", global_worker.gcs_client)
        wait_until(lambda: "a played error" in caplog.text, 20.0, "Ray's listener tells")
    assert capsys.readouterr().out == ""


def test_creators_that_race_get_one_actor_each(running: Cluster) -> None:
    node_id = clusters.resolve_node_id("")
    before = running.status().nodes[0].pid
    for _ in range(3):
        node_actor(running.address, node_id, 2 * POOL_BYTES, 1 << 20, "")
    actor = ask.find_node_actor(node_id)
    described = ask.describe(actor, 10.0)
    assert described.pid == before
    assert described.pool_bytes == POOL_BYTES


def test_engine_of_other_protocol_is_refused_by_name(
    running: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played_engine, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    with pytest.raises(AssertionError, match=rf"{PROTOCOL_VERSION + 1}.*{PROTOCOL_VERSION}"):
        PlayedEngine(clusters.resolve_node_id(""), "e", "ns", num_blocks=None)


def test_garbage_message_leaves_scheduler_actor_alive(running: Cluster) -> None:
    scheduler = ask.find_scheduler_actor()
    assert scheduler is not None
    with pytest.raises(MessageError):
        ray.get(scheduler.report.remote(b"\xff\x00nonsense"), timeout=10)
    assert running.status().nodes


def test_unknown_node_id_is_refused_with_live_ones(running: Cluster) -> None:
    with pytest.raises(ClusterError, match="no live node of the cluster"):
        clusters.resolve_node_id("ab" * 28)


def test_down_ends_actors_and_frees_pool(running: Cluster) -> None:
    pid = running.status().nodes[0].pid
    assert "ended 2 actors" in run("down")
    import psutil

    wait_until(lambda: not psutil.pid_exists(pid), 20.0, "the NodeActor's process ends")
