"""The ingress in front of replicas that are plain generators: what a client gets, and when."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tracemalloc
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError
from ray.serve.exceptions import BackPressureError

from raykv.serve.http import ingress as module
from raykv.serve.http import metrics
from raykv.serve.http.exchange import STARTS, Head, HttpRequest, MadePiece
from raykv.serve.http.ingress import (
    BrokenAnswerError,
    NoReplicaError,
    ReplicaBackend,
)
from raykv.serve.http.metrics import ReplicaMetrics, SharedMetrics
from raykv.vllm.transcript import Delta
from tests.fixtures.asgi import Client
from tests.fixtures.replicas import EVENTS, Replicas, ask, asking, error_of, ingress
from tests.fixtures.serve_handle import Handle, Pieces

DIED = ActorDiedError()
LOST = ObjectLostError("0" * 56, None, "")
AWAY = ActorUnavailableError("away", b"0" * 16)


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.0)


def models_of(*replicas: Replicas) -> Client:
    return ask(ingress(*replicas), Client(method="GET", path="/v1/models", body=[b""]))


def listing(*names: str) -> list[Any]:
    data = [{"id": name, "object": "model"} for name in names]
    return [Head(200, []), json.dumps({"object": "list", "data": data}).encode()]


# Passing on


def test_request_goes_on_as_it_came_and_answer_comes_back() -> None:
    replicas = Replicas([Head(201, [(b"x-y", b"z")]), b"one", b"two"])
    client = ask(ingress(replicas), Client(body=[b"ab", b"", b"cd"], headers=[(b"h", b"v")]))
    assert (client.status, client.answered, client.text) == (201, {b"x-y": b"z"}, "onetwo")
    assert client.is_whole
    (request,) = replicas.asked
    assert request == HttpRequest("POST", "/v1/completions", b"", [(b"h", b"v")], b"abcd")


@pytest.mark.parametrize(
    ("root", "path", "expected"),
    [
        ("", "/v1/models", "/v1/models"),
        ("/llm", "/llm/v1/models", "/v1/models"),
        ("/v1", "/v1models", "/v1models"),
        ("/a/b", "/a/b/", "/"),
    ],
)
def test_replica_knows_nothing_of_the_prefix_of_the_route(
    root: str, path: str, expected: str
) -> None:
    replicas = Replicas([Head(200, [])])
    ask(ingress(replicas), Client(root_path=root, path=path))
    assert [request.path for request in replicas.asked] == [expected]


async def test_pieces_are_passed_on_when_they_come() -> None:
    go_on = asyncio.Event()
    client = Client()
    asked = client.ask(ingress(Replicas([Head(200, EVENTS), b"one", go_on, b"two"])))
    task = asyncio.create_task(asked)
    await client.heard(1)
    assert (client.text, client.is_whole) == ("one", False)
    go_on.set()
    await task
    assert (client.text, client.is_whole) == ("onetwo", True)


# Models


def test_request_goes_to_the_model_that_it_names_or_to_the_only_one() -> None:
    first, second = Replicas([Head(200, []), b"first"]), Replicas([Head(200, []), b"second"])
    app = ingress(first, second)
    assert [ask(app, asking(name)).text for name in ("m1", "m0")] == ["second", "first"]
    assert ask(ingress(first), asking("other")).text == "first"


@pytest.mark.parametrize("model", ["m2", "", 7, ["m0"], {"m0": 1}])
def test_unknown_model_is_refused_with_those_that_there_are(model: Any) -> None:
    client = ask(ingress(Replicas([]), Replicas([])), asking(model))
    assert client.status == 404
    assert "m0, m1" in error_of(client)


@pytest.mark.parametrize("body", [b"", b"no JSON", b"[1]", b"{}", b'{"model": null}', b"\xff"])
def test_request_without_a_model_is_left_to_vllm(body: bytes) -> None:
    first, second = Replicas([Head(400, []), b"vLLM's words"]), Replicas([])
    client = ask(ingress(first, second), Client(body=[body]))
    assert (client.status, client.text) == (400, "vLLM's words")


@pytest.mark.parametrize("num_models", [1, 2])
@pytest.mark.parametrize("inner", [b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100])
def test_body_that_is_nested_too_deeply_is_refused_before_anybody_is_asked(
    num_models: int, inner: bytes
) -> None:
    """A replica that has died of it would be followed by the next one."""
    replicas = [Replicas([]) for _ in range(num_models)]
    client = ask(ingress(*replicas), Client(body=[b'{"model": ', inner, b"}"]))
    assert client.status == 400
    assert "nested deeper than 100" in error_of(client)
    assert not any(each.asked for each in replicas)


def test_models_of_all_are_in_one_list_without_those_that_have_no_replicas() -> None:
    gone = Replicas([NoReplicaError("none")])
    listed = models_of(gone, Replicas(listing("a", "lora")), Replicas(listing("b")))
    assert listed.status == 200
    data = [{"id": name, "object": "model"} for name in ("a", "lora", "b")]
    assert json.loads(listed.text) == {"object": "list", "data": data}
    assert models_of(gone, Replicas([DIED])).status == 503


def test_list_of_models_that_is_refused_says_why() -> None:
    refusal = [Head(401, []), b'{"error": "Unauthorized"}']
    refused = models_of(Replicas(refusal), Replicas(refusal))
    assert (refused.status, refused.text) == (401, '{"error": "Unauthorized"}')


# Metrics


class Metered(Replicas):
    def __init__(self, *pages: ReplicaMetrics, error: Exception | None = None) -> None:
        super().__init__([Head(200, []), b"of one replica"])
        self.pages = pages
        self.error = error
        self.times_asked = 0

    async def metrics(self) -> Sequence[ReplicaMetrics]:
        self.times_asked += 1
        if self.error is not None:
            raise self.error
        return self.pages


def scraper(key: str = "") -> Client:
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    return Client(method="GET", path="/metrics", body=[b""], headers=headers)


def keyed(replica: str, *keys: str) -> ReplicaMetrics:
    """The page of a replica whose vLLM has API keys."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]
    return ReplicaMetrics("d", replica, "x_total 1\n", digests)


def test_metrics_are_those_of_all_replicas_that_answer() -> None:
    app = ingress(Metered(keyed("r1"), keyed("r2")), Metered(error=TimeoutError()), Replicas([]))
    client = ask(app, scraper())
    assert client.answered[b"content-type"].startswith(b"text/plain")
    assert client.text.splitlines() == [
        'x_total{deployment="d",replica="r1"} 1',
        'x_total{deployment="d",replica="r2"} 1',
    ]
    assert ask(ingress(Metered(error=TimeoutError())), scraper()).status == 503


def test_metrics_of_replicas_with_keys_are_shown_to_who_has_one() -> None:
    app = ingress(Metered(keyed("r1", "first", "second")), Metered(keyed("r2", "third")))
    for key, shown in (("first", "r1"), ("second", "r1"), ("third", "r2")):
        text = ask(app, scraper(key)).text
        assert text == f'x_total{{deployment="d",replica="{shown}"}} 1\n'
    for key in ("", "fourth", "firs"):
        refused = ask(app, scraper(key))
        assert refused.status == 401
        assert "API key" in error_of(refused)
    basic = Client(method="GET", path="/metrics", body=[b""], headers=[(b"authorization", b"\xff")])
    assert ask(app, basic).status == 401


async def test_replicas_are_asked_once_for_metrics_however_many_ask_until_they_are_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Metered(keyed("r1", "first"))
    app = ingress(backend)
    async with asyncio.TaskGroup() as group:
        for key in ("first", "", "other", "first"):
            group.create_task(scraper(key).ask(app))
    await scraper("other").ask(app)
    assert backend.times_asked == 1
    monkeypatch.setattr(metrics, "METRICS_FRESH_S", 0.0)
    for _ in range(2):
        await scraper("first").ask(app)
    assert backend.times_asked == 3


async def test_client_that_leaves_takes_the_metrics_from_nobody_else() -> None:
    asked, told = asyncio.Event(), asyncio.Event()

    async def collect() -> list[ReplicaMetrics]:
        asked.set()
        await told.wait()
        return [keyed("r1")]

    shared = SharedMetrics(collect)
    leaving = asyncio.create_task(shared.page(b""))
    await asked.wait()
    leaving.cancel()
    staying = asyncio.create_task(shared.page(b""))
    await asyncio.wait([leaving])
    told.set()
    assert b'replica="r1"' in await staying


# Replicas that die


@pytest.mark.parametrize("death", [DIED, AWAY, LOST])
def test_replica_that_dies_before_its_answer_is_followed_by_another(death: Exception) -> None:
    replicas = Replicas([death], [death], [Head(200, []), b"third"])
    client = ask(ingress(replicas), asking())
    assert (client.status, client.text) == (200, "third")
    assert len(replicas.asked) == 3
    assert len({request.body for request in replicas.asked}) == 1


def test_stream_of_events_that_has_begun_ends_with_an_error_event() -> None:
    replicas = Replicas([Head(200, EVENTS), b"data: one\n\n", DIED])
    client = ask(ingress(replicas), asking())
    assert (client.status, client.is_whole) == (200, True)
    first, last = client.text.split("\n\n", 1)
    assert first == "data: one"
    assert "died" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert len(replicas.asked) == 1, "half an answer is never followed by another one"


def test_other_answer_that_has_begun_is_cut_not_ended() -> None:
    client = asking()
    with pytest.raises(BrokenAnswerError, match="died"):
        ask(ingress(Replicas([Head(200, []), b'{"half":', DIED])), client)
    assert client.text == '{"half":'
    assert not client.is_whole


def test_failing_replica_is_an_error_for_its_request_only() -> None:
    replicas = Replicas([KeyError("of the replica")], [Head(200, []), b"well"])
    app = ingress(replicas)
    client = ask(app, asking())
    assert client.status == 500
    assert "log" in error_of(client)
    assert ask(app, asking()).text == "well"
    broken = asking()
    with pytest.raises(KeyError):
        ask(ingress(Replicas([Head(200, EVENTS), b"data: 1\n\n", KeyError("x")])), broken)
    assert not broken.is_whole


@pytest.mark.parametrize(
    ("error", "said", "times_asked"),
    [
        (NoReplicaError("none in 60 s"), "none in 60 s", 1),
        (BackPressureError(9, 8), str(BackPressureError(9, 8)), 1),
    ],
)
def test_request_that_nobody_takes_is_to_come_back_later(
    error: Exception, said: str, times_asked: int
) -> None:
    replicas = Replicas([error])
    client = ask(ingress(replicas, attempts=2), asking())
    assert (client.status, client.answered[b"retry-after"]) == (503, b"5")
    assert said in error_of(client)
    assert len(replicas.asked) == times_asked


# Bodies


def test_long_body_is_refused_and_never_passed_on() -> None:
    replicas = Replicas([Head(200, []), b"well"])
    app = ingress(replicas, max_body_bytes=10)
    client = ask(app, Client(body=[b"x" * 6, b"x" * 5, b"never read"]))
    assert client.status == 413
    assert "10 bytes" in error_of(client)
    assert client.body == [b"never read"]
    assert ask(app, Client(body=[b"x" * 6, b"x" * 4])).text == "well"
    assert len(replicas.asked) == 1


async def test_bodies_of_all_requests_have_a_bound_which_each_gives_back() -> None:
    go_on = asyncio.Event()
    app = ingress(Replicas([Head(200, EVENTS), b"one", go_on]), max_held_bytes=10)
    held = Client(body=[b"x" * 8])
    task = asyncio.create_task(held.ask(app))
    await held.heard(1)
    refused, small = Client(body=[b"x" * 3]), Client(body=[b"x" * 2])
    await refused.ask(app)
    assert (refused.status, refused.answered[b"retry-after"]) == (503, b"5")
    other = asyncio.create_task(small.ask(app))
    await small.heard(1)
    go_on.set()
    await asyncio.gather(task, other)
    whole = Client(body=[b"x" * 10])
    await whole.ask(app)
    assert whole.status == 200
    assert app._held_bytes == 0


def test_body_is_in_memory_once_while_it_is_answered() -> None:
    num_bytes = 8 << 20
    held: list[int] = []

    class Measuring(Replicas):
        async def answer(self, request: HttpRequest) -> AsyncGenerator[Head | bytes, None]:
            held.append(tracemalloc.get_traced_memory()[0])
            assert len(request.body) == num_bytes
            yield Head(200, [])

    client = Client(body=[b"x" * num_bytes])
    tracemalloc.start()
    try:
        ask(ingress(Measuring([])), client)
    finally:
        tracemalloc.stop()
    assert num_bytes <= held[0] < 1.5 * num_bytes


def test_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_S", 0.02)
    app = ingress(Replicas([]))
    assert ask(app, Client(body=[b"half"], is_unfinished=True)).status == 408
    assert app._held_bytes == 0


# Clients that leave


async def test_client_that_leaves_takes_its_request_along() -> None:
    replicas, client = Replicas([Head(200, EVENTS), b"one", asyncio.Event()]), asking()
    app = ingress(replicas)
    task = asyncio.create_task(client.ask(app))
    await client.heard(1)
    assert replicas.ended == 0
    client.leave()
    await task
    assert replicas.ended == 1
    assert app._held_bytes == 0


async def test_cancelled_request_ends_at_its_replica() -> None:
    replicas = Replicas([asyncio.Event()])
    task = asyncio.create_task(asking().ask(ingress(replicas)))
    while not replicas.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert replicas.ended == 1


async def test_client_that_cannot_be_sent_to_ends_its_request_at_once() -> None:
    class Closed(Client):
        async def _send(self, message: Any) -> None:
            raise OSError("closed")

    replicas = Replicas([Head(200, EVENTS), b"one", asyncio.Event()])
    with pytest.raises(OSError, match="closed"):
        await Closed().ask(ingress(replicas))
    assert replicas.ended == 1


def test_client_that_leaves_within_its_body_is_not_answered() -> None:
    replicas, client = Replicas([]), Client(body=[b"half"], is_unfinished=True)
    client.leave()
    assert ask(ingress(replicas), client).status is None
    assert not replicas.asked


# What is not HTTP


async def test_lifespan_and_websockets_are_answered() -> None:
    sent: list[str] = []
    inbox = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return inbox.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    app = ingress(Replicas([]))
    await app({"type": "lifespan"}, receive, send)
    await app({"type": "websocket", "path": "/"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete", "websocket.close"]


# Serve's handles


async def test_request_that_no_replica_takes_in_time_is_withdrawn() -> None:
    pieces, client = Pieces(Head(200, [])), asking()
    await client.ask(ingress(ReplicaBackend(Handle(pieces), wait_s=0.02)))
    assert client.status == 503
    assert "within 0.02 s" in error_of(client)
    assert pieces.is_cancelled


async def test_taken_request_is_not_withdrawn_and_who_placed_it_hears_of_its_answer() -> None:
    heard: list[str] = []

    class Watching(Handle):
        def remote(self, request: HttpRequest) -> Any:
            STARTS[id(request)] = lambda: heard.append("begun")
            return super().remote(request)

    made = (Delta((1,)),)
    empty, well = MadePiece(b"", made, ""), MadePiece(b"well", made, "")
    pieces, go_on = Pieces(b"", Head(200, []), empty, well, b"done"), asyncio.Event()
    pieces.pieces.insert(3, go_on)
    pieces.is_taken.set()
    client = asking()
    backend = ReplicaBackend(Watching(pieces), wait_s=0.001)
    task = asyncio.create_task(client.ask(ingress(backend)))
    while len(pieces.pieces) > 2:
        await asyncio.sleep(0)
    assert heard == []
    go_on.set()
    await task
    assert client.text == "welldone"
    assert heard == ["begun"]
    assert not pieces.is_cancelled


async def test_client_that_leaves_while_it_waits_withdraws_its_request() -> None:
    pieces, client = Pieces(), asking()
    task = asyncio.create_task(client.ask(ingress(ReplicaBackend(Handle(pieces)))))
    await asyncio.sleep(0)
    client.leave()
    await task
    assert pieces.is_cancelled
    assert client.status is None
