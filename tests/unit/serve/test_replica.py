"""A replica whose engine lives or not; what it tells Serve and the ingress, without either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from raykv.base.errors import SettingError
from raykv.serve import replica as module
from raykv.serve.arguments import ModelArguments, parse
from raykv.serve.http.exchange import Head, HttpRequest, MadePiece, Piece, unpacked
from raykv.serve.models import SMOLLM2_NAME
from raykv.serve.replica import EngineReplica
from raykv.vllm.transcript import CURRENT, Delta
from tests.fixtures.asgi import app_of, body, start, take

REQUEST = HttpRequest("POST", "/v1/completions", b"", [], b"{}")
FAILED = "the process ended"
TAKEN = b""
"""Says that the request has come."""


async def pieces_of(replica: EngineReplica) -> AsyncGenerator[Piece, None]:
    async with aclosing(replica.handle_http(REQUEST)) as sent:
        async for each in sent:
            yield unpacked(each)


class Engine:
    """As much of vLLM's as a replica looks at."""

    errored = False


class Replica(EngineReplica):
    """Its end is an error that a test can see."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._engine = Engine()
        self._watch = asyncio.create_task(self._end_with_engine())

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing has been started."""

    async def _end_with_engine(self) -> None:
        while not self._engine.errored:
            await asyncio.sleep(0)
        raise RuntimeError(FAILED)


async def test_head_comes_with_the_first_piece_of_the_body() -> None:
    go_on = asyncio.Event()

    async def steps(receive: Any, send: Any) -> None:
        await send(start())
        await go_on.wait()
        await send(body(b"one", more=True))
        await send(body(b"two", more=False))

    pieces = pieces_of(Replica(app_of(steps)))
    assert await anext(pieces) == TAKEN
    first = asyncio.create_task(anext(pieces))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not first.done()
    go_on.set()
    assert await first == Head(200, [])
    assert [piece async for piece in pieces] == [b"one", b"two"]


async def test_signs_of_life_and_news_come_before_the_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 0.01)
    delta = Delta((1, 2))

    async def steps(receive: Any, send: Any) -> None:
        transcript = CURRENT.get()
        assert transcript is not None
        transcript.add(delta)
        await send(start())
        await asyncio.sleep(0.2)
        transcript.begin("because of n")
        await send(body(b"one", more=False))

    seen = [piece async for piece in pieces_of(Replica(app_of(steps)))]
    told, *alive = seen[1:-2]
    assert (seen[0], told) == (TAKEN, MadePiece(b"", (delta,), ""))
    assert {*alive} == {b""}
    assert seen[-2:] == [Head(200, []), MadePiece(b"one", (), "because of n")]


@pytest.mark.parametrize(("status", "text"), [(204, []), (500, [b"sorry"])])
async def test_answer_of_a_living_engine_is_passed_on(status: int, text: list[bytes]) -> None:
    async def steps(receive: Any, send: Any) -> None:
        await send(start(status))
        await send(body(b"".join(text), more=False))

    pieces = pieces_of(Replica(app_of(steps)))
    assert [piece async for piece in pieces] == [TAKEN, Head(status, []), *text]


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("text", [b'data: {"error": "EngineDeadError"}', b""])
async def test_replica_ends_before_it_tells_anybody_that_its_engine_died(
    status: int, text: bytes
) -> None:
    async def steps(receive: Any, send: Any) -> None:
        await send(start(status))
        replica._engine.errored = True
        await send(body(text, more=False))

    replica = Replica(app_of(steps))
    seen: list[Any] = []
    with pytest.raises(RuntimeError, match=FAILED):
        await take(pieces_of(replica), seen)
    assert seen == [TAKEN]


async def test_caller_that_leaves_ends_the_request_at_once() -> None:
    ended: list[int] = []

    async def steps(receive: Any, send: Any) -> None:
        await send(start())
        await send(body(b"one", more=True))
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    async with aclosing(pieces_of(Replica(app_of(steps)))) as pieces:
        assert [await anext(pieces) for _ in range(2)] == [TAKEN, Head(200, [])]
        assert not ended
    assert ended


def test_small_model_is_served_from_its_folder_under_both_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "raykv" / SMOLLM2_NAME
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = module._with_path(parse(ModelArguments, {"model": "smollm2"}))
    assert (small.model, small.served_names) == (str(folder), ["smollm2", str(folder)])
    assert small.engine_args["enforce_eager"]
    named = {"model": "smollm2", "engine_args": {"served_model_name": "mine"}}
    assert module._with_path(parse(ModelArguments, named)).served_names == ["mine"]
    other = parse(ModelArguments, {"model": str(tmp_path)})
    assert module._with_path(other) == other
    with pytest.raises(SettingError, match="there is no model at"):
        module._with_path(parse(ModelArguments, {"model": f"{tmp_path}/nothing"}))
