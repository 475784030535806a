"""Over HTTP, the usage of each answer says where the tokens of its prompt came from, the spans of
its trace what it waited for, and `raykv explain` where the prompt leaves those before it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from raykv.base.errors import ClusterError
from raykv.client.cluster import Cluster
from raykv.cluster import join as actors
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from raykv.protocol.reader import Explanation
from tests.fixtures.collector import Collector, collecting
from tests.fixtures.server import Server, served
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(600)]

BLOCK = 32
PROMPT_BLOCKS = 12
CHUNK_BYTES = 4 * 2 * 2 * 64 * 4 * BLOCK
SOURCES = ("computed", "own_cache", "same_node", "other_node", "disk")
SMALL_POOL = str(6 * PROMPT_BLOCKS * CHUNK_BYTES)
"""Of the first node, which has a disk too: a few prompts fill it."""

ALWAYS_FETCH = {
    "always_fetch": True,
    "request_deadline_s": 30.0,
    "step_deadline_s": 20.0,
}
"""However fast this small model computes on this machine."""


def text_of(number: int) -> str:
    """A prompt that no other begins like; a character is a token."""
    return f"{number:04d} " + "All happy families are alike. " * PROMPT_BLOCKS


def transfer(**settings: Any) -> list[str]:
    extra = {"kv_connector_extra_config": {**ALWAYS_FETCH, **settings}}
    return ["--kv-transfer-config", json.dumps(extra)]


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


@pytest.fixture(scope="module")
def servers(
    cluster: Cluster,
    second: LocalNode,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Server, Server]]:
    """One on the head node, and one on the second, which traces."""
    cluster.down()
    folder = tmp_path_factory.mktemp("servers")
    (folder / "first").mkdir()
    (folder / "second").mkdir()
    (folder / "disk").mkdir()
    on_first = transfer(
        node_id=actors.resolve_node_id(""),
        disk_path=str(folder / "disk"),
        disk_bytes="64MiB",
        disk_free_bytes="1MiB",
    )
    on_second = transfer(node_id=second.node_id)
    on_second += ["--otlp-traces-endpoint", collector.endpoint]
    address = cluster.address
    with (
        served(folder / "first", address, *on_first, pool=SMALL_POOL) as one,
        served(folder / "second", address, *on_second, cores="1") as two,
    ):
        yield one, two


def sources_in(usage: dict[str, Any]) -> dict[str, int]:
    """Checked to account for every token of the prompt."""
    found: dict[str, int] = usage["prompt_tokens_details"]["raykv_sources"]
    assert tuple(found) == SOURCES
    assert sum(found.values()) == usage["prompt_tokens"]
    return {source: count for source, count in found.items() if count}


def complete(server: Server, text: str) -> dict[str, int]:
    body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
    answer = server.post("/v1/completions", body)
    assert not answer["kv_transfer_params"]
    return sources_in(answer["usage"])


WHOLE = {"model": "tiny", "max_tokens": 4, "temperature": 0}


@pytest.mark.versions
def test_usage_says_what_was_computed_cached_and_loaded(servers: tuple[Server, Server]) -> None:
    _, server = servers
    text = text_of(1)
    num_tokens = len(text)
    whole = num_tokens // BLOCK * BLOCK
    assert complete(server, text) == {"computed": num_tokens}
    rest = {"computed": num_tokens - whole}
    assert complete(server, text) == {"own_cache": whole, **rest}
    wait_until(
        lambda: server.counter("vllm:kv_offload_store_bytes_total") >= whole // BLOCK * CHUNK_BYTES,
        20.0,
        "chunks are stored",
    )
    server.post("/reset_prefix_cache")
    assert complete(server, text) == {"same_node": whole, **rest}


@pytest.mark.versions
@pytest.mark.parametrize("stops_by_itself", [True, False], ids=["length", "stop_string"])
def test_stream_says_it_in_its_last_piece(
    servers: tuple[Server, Server], stops_by_itself: bool
) -> None:
    _, server = servers
    text = text_of(2 + stops_by_itself)
    body: dict[str, Any] = {**WHOLE, "prompt": text, "stream_options": {"include_usage": True}}
    if not stops_by_itself:
        # Then the API server ends the request, and EngineCore does not.
        body["stop"] = [server.complete(text)[:1]]
    last = server.stream("/v1/completions", body)[-1]
    expected = len(text) if stops_by_itself else len(text) % BLOCK
    assert sources_in(last["usage"])["computed"] == expected


@pytest.mark.versions
@pytest.mark.parametrize("is_streamed", [True, False], ids=["stream", "whole"])
def test_chat_says_it(servers: tuple[Server, Server], is_streamed: bool) -> None:
    _, server = servers
    content = text_of(4 + is_streamed)
    body = {**WHOLE, "messages": [{"role": "user", "content": content}]}
    if is_streamed:
        options = {"stream_options": {"include_usage": True}}
        answer = server.stream("/v1/chat/completions", {**body, **options})[-1]
    else:
        answer = server.post("/v1/chat/completions", body)
    assert sources_in(answer["usage"])["computed"] >= len(content)


def test_answers_of_one_prompt_each_account_for_all_of_it(servers: tuple[Server, Server]) -> None:
    _, server = servers
    text = text_of(6)
    body = {**WHOLE, "prompt": text, "n": 3, "temperature": 1.0}
    usage = server.post("/v1/completions", body)["usage"]
    assert usage["prompt_tokens"] == len(text)
    assert sum(sources_in(usage).values()) == len(text)


def test_usage_says_what_another_node_had_and_what_a_disk(servers: tuple[Server, Server]) -> None:
    first, second = servers
    numbers = iter(range(100, 200))
    asked: list[int] = []

    def comes_from(source: str, number: int) -> bool:
        text = text_of(number)
        found = complete(second, text)
        if source not in found:
            return False
        assert set(found) == {source, "computed"}
        return True

    def is_fetched_from_the_pool() -> bool:
        asked.append(next(numbers))
        complete(first, text_of(asked[-1]))
        return comes_from("other_node", asked[-1])

    wait_until(is_fetched_from_the_pool, 60.0, "the second node fetches what the first one has")
    # What the first one's pool gives up goes to its disk, the oldest first; the second one has not
    # asked for these.
    unasked = [next(numbers) for _ in range(20)]
    for number in unasked:
        complete(first, text_of(number))
    left = iter(unasked)
    wait_until(lambda: comes_from("disk", next(left)), 60.0, "one comes from the disk")


@pytest.mark.versions
def test_trace_of_a_request_has_its_lookup_its_fetch_and_its_load(
    servers: tuple[Server, Server], collector: Collector
) -> None:
    first, second = servers
    numbers = iter(range(300, 400))
    parent = "b7ad6b7169203331"
    fetched: list[str] = []

    def is_fetched() -> bool:
        number = next(numbers)
        text = text_of(number)
        complete(first, text)
        trace_id = f"{number:032x}"
        headers = {"traceparent": f"00-{trace_id}-{parent}-01"}
        body = {**WHOLE, "prompt": text}
        usage = second.post("/v1/completions", body, headers)["usage"]
        fetched[:] = [trace_id]
        return "other_node" in sources_in(usage)

    wait_until(is_fetched, 60.0, "the second node fetches what the first one has")
    names = {"raykv.lookup", "raykv.fetch", "raykv.load"}
    spans: dict[str, Any] = {}

    def has_all() -> bool:
        spans.update(collector.of_trace(fetched[0]))
        return names | {"llm_request"} <= set(spans)

    wait_until(has_all, 30.0, "the collector has the spans of vLLM and of RayKV")
    assert {span.parent_span_id.hex() for span in spans.values()} == {parent}
    lookup, fetch, load = (spans[name] for name in ("raykv.lookup", "raykv.fetch", "raykv.load"))
    assert lookup.end_time_unix_nano == pytest.approx(fetch.start_time_unix_nano, abs=1e6)
    assert fetch.end_time_unix_nano == pytest.approx(load.start_time_unix_nano, abs=1e6)
    assert all(span.start_time_unix_nano < span.end_time_unix_nano for span in (fetch, load))
    request = spans["llm_request"]
    assert request.start_time_unix_nano - 1e6 < lookup.start_time_unix_nano
    assert load.end_time_unix_nano < request.end_time_unix_nano + 1e6
    loaded = {each.key: each.value.int_value for each in load.attributes}
    assert loaded["raykv.load_tokens"] == loaded["raykv.other_node_tokens"] == 11 * BLOCK


def explained(cluster: Cluster, answer: dict[str, Any]) -> Explanation:
    """What is known of the request that was answered."""
    found: list[Explanation] = []

    def is_told() -> bool:
        with contextlib.suppress(ClusterError):
            found[:] = cluster.why_miss(answer["id"])
        return bool(found)

    wait_until(is_told, 20.0, "the request's record comes")
    return found[0]


@pytest.mark.versions
def test_why_miss_names_the_token_at_which_a_date_parts_prompts(
    servers: tuple[Server, Server], cluster: Cluster
) -> None:
    server, _ = servers
    begin, rest = "Date: 2025-11-2", "You are a helpful assistant. " * 12

    def ask(day: int) -> Explanation:
        body = {**WHOLE, "prompt": f"{begin}{day}. {rest}"}
        return explained(cluster, server.post("/v1/completions", body))

    ask(4)
    wait_until(lambda: ask(4).record.parting is None, 20.0, "it is known")
    known = ask(5)
    parting = known.record.parting
    assert parting is not None
    assert (parting.at, parting.is_same, parting.own) == (len(begin), False, [])
    wait_until(
        lambda: cluster.why_miss(known.record.request_id)[0].nearest_is_cached,
        20.0,
        "the prompt that it left is cached",
    )
