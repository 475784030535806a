"""An ASGI application driven as a replica drives vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from raykv.serve.http import exchange as http
from raykv.serve.http.exchange import Head, HttpRequest, MadePiece, Piece, drive
from raykv.vllm.transcript import CURRENT, Delta
from tests.fixtures.asgi import app_of, body, start, take

Send = Callable[[Any], Awaitable[None]]

REQUEST = HttpRequest("POST", "/v1/x", b"a=1", [(b"host", b"here")], b"question")


async def all_of(pieces: Any) -> list[Piece]:
    return [piece async for piece in pieces]


DEEP = http.MAX_NESTING


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", False),
        (b"no JSON ]]]", False),
        (b"[" * DEEP + b"]" * DEEP, False),
        (b"[" * (DEEP + 1) + b"]" * (DEEP + 1), True),
        (b'{"a":' * (DEEP + 1), True),
        (b"[[],{}]," * 10_000, False),
        (b'{"text": "' + b"[{" * 10_000 + b'"}', False),
        (b'{"text": "' + b"\\\\[" * 1000 + b'\\"[[' + b'[["}', False),
        (b'{"text": "\\\\", "a": ' + b"[" * DEEP, True),
        (('{"a": "\\"", "b": ' + "[" * DEEP).encode("utf-16"), True),
        (('{"a": "\\u2200", "b": "' + "[" * DEEP).encode("utf-32"), False),
    ],
    ids=range(11),
)
def test_nesting_is_that_of_objects_and_lists_outside_of_strings(
    text: bytes, expected: bool
) -> None:
    assert http.is_nested_too_deeply(text) is expected


@pytest.mark.parametrize(
    ("depth", "kind", "status"),
    [
        (DEEP, b"application/json", 200),
        (DEEP + 1, b"application/json", 400),
        (DEEP + 1, b"application/vnd.x+JSON; charset=utf-8", 400),
        (DEEP + 1, b"audio/wav", 200),
    ],
)
async def test_middleware_refuses_only_json_that_is_nested_too_deeply(
    depth: int, kind: bytes, status: int
) -> None:
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        seen.append((await receive())["body"])
        await send(start(200))
        await send(body(b"", more=False))

    text = b"[" * depth + b"]" * depth
    request = HttpRequest("POST", "/v1/x", b"", [(b"Content-Type", kind)], text)
    head, *said = await all_of(drive(http.NestingLimit(app), request))
    assert isinstance(head, Head)
    assert head.status == status
    assert seen == ([text] if status == 200 else [])
    assert status == 200 or b"nested deeper than 100" in b"".join(map(bytes, said))  # type: ignore[arg-type]


async def test_middleware_gives_a_body_on_as_it_came_and_then_that_the_client_has_left() -> None:
    came = [
        {"type": "http.request", "body": b"[1,", "more_body": True},
        {"type": "http.request", "body": b"2]", "more_body": False},
        {"type": "http.disconnect"},
    ]
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        seen.extend([await receive() for _ in came])

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    left = list(came)
    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    await http.NestingLimit(app)(scope, receive, send)
    assert seen == came


async def test_request_is_read_and_pieces_come_when_they_are_sent() -> None:
    seen: list[Any] = []
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        seen.append((scope["method"], scope["path"], scope["query_string"], scope["headers"]))
        seen.append((await receive())["body"])
        await send(start(201, (b"x", b"y")))
        await send(body(b"one", more=True))
        await send(body(b"", more=True))
        await go_on.wait()
        await send(body(b"two", more=False))

    pieces = drive(app, REQUEST)
    assert [await anext(pieces), await anext(pieces)] == [Head(201, [(b"x", b"y")]), b"one"]
    assert seen == [("POST", "/v1/x", b"a=1", [(b"host", b"here")]), b"question"]
    go_on.set()
    assert await all_of(pieces) == [b"two"]


@pytest.mark.parametrize("has_begun", [False, True])
async def test_what_application_raises_comes_out(has_begun: bool) -> None:
    async def steps(receive: Any, send: Send) -> None:
        if has_begun:
            await send(start())
            await send(body(b"half", more=True))
        raise KeyError("of the application")

    seen: list[Any] = []
    with pytest.raises(KeyError, match="of the application"):
        await take(drive(app_of(steps), REQUEST), seen)
    assert seen == ([Head(200, []), b"half"] if has_begun else [])


async def test_error_after_whole_answer_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    async def steps(receive: Any, send: Send) -> None:
        await send(start(500))
        await send(body(b"sorry", more=False))
        raise KeyError("said already")

    assert await all_of(drive(app_of(steps), REQUEST)) == [Head(500, []), b"sorry"]
    assert "said already" in caplog.text


async def test_closing_cancels_application_which_then_hears_that_client_left() -> None:
    ended: list[str] = []

    async def steps(receive: Any, send: Send) -> None:
        await receive()
        await send(start())
        try:
            await receive()
        finally:
            ended.append((await receive())["type"])

    async with aclosing(drive(app_of(steps), REQUEST)) as pieces:
        assert await anext(pieces) == Head(200, [])
        assert not ended
    assert ended == ["http.disconnect"]


async def test_cancelled_reader_cancels_application() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def steps(receive: Any, send: Send) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    reading = asyncio.create_task(all_of(drive(app_of(steps), REQUEST)))
    await began.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert ended.is_set()


async def test_slow_reader_holds_application_up() -> None:
    sent: list[int] = []

    async def steps(receive: Any, send: Send) -> None:
        await send(start())
        for number in range(1000):
            await send(body(b"x", more=True))
            sent.append(number)

    async with aclosing(drive(app_of(steps), REQUEST)) as pieces:
        await anext(pieces)
        for _ in range(5000):
            await asyncio.sleep(0)
        assert len(sent) <= http._MAX_PIECES + 1
        await anext(pieces)
    assert len(sent) <= http._MAX_PIECES + 3


async def test_application_that_goes_on_when_cancelled_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LEAVE_S", 0.05)

    enough = asyncio.Event()
    sent: list[int] = []

    async def steps(receive: Any, send: Send) -> None:
        await send(start())
        while not enough.is_set():
            try:
                await asyncio.sleep(0.001)
            except asyncio.CancelledError:
                sent.clear()
            await send(body(b"x" * 10, more=True))
            sent.append(1)

    async with aclosing(drive(app_of(steps), REQUEST)) as pieces:
        await anext(pieces)
    was = len(sent)
    while len(sent) < was + http._MAX_PIECES * 2:
        await asyncio.sleep(0.001)
    enough.set()


async def test_what_another_replica_has_made_is_known_to_who_makes_the_rest() -> None:
    known = (Delta((1, 2)), Delta((3,)))
    seen: list[Any] = []

    async def steps(receive: Any, send: Any) -> None:
        transcript = CURRENT.get()
        assert transcript is not None
        seen.append(transcript.known)
        transcript.add(Delta((4,)))
        await send(start())
        await send(body(b"one", more=False))

    request = replace(REQUEST, known=known)
    pieces = await all_of(drive(app_of(steps), request))
    assert (seen, pieces) == ([known], [Head(200, []), MadePiece(b"one", (Delta((4,)),), "")])
    assert CURRENT.get() is None


async def test_what_is_told_stays_in_order_however_signs_of_life_fall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 0.0)

    async def steps(receive: Any, send: Any) -> None:
        transcript = CURRENT.get()
        assert transcript is not None
        await send(start())
        for token in range(300):
            transcript.add(Delta((token,)))
            if token % 3 == 0:
                await send(body(b"x", more=True))
            if token % 5 == 0:
                await asyncio.sleep(0)
        await send(body(b"", more=False))

    pieces = await all_of(drive(app_of(steps), REQUEST))
    made = [piece for piece in pieces if isinstance(piece, MadePiece)]
    tokens = [token for piece in made for delta in piece.deltas for token in delta.token_ids]
    assert tokens == sorted(tokens)
    assert len(tokens) >= 298


@pytest.mark.parametrize(
    "piece",
    [
        Head(200, [(b"a", b"b")]),
        b"",
        b"\0\1text",
        MadePiece(b"", (), "because of n"),
        MadePiece(b"text", (Delta((1, 2)), Delta((), "stop", "END"), Delta((3,), "stop", 9)), ""),
    ],
    ids=str,
)
def test_pieces_go_through_ray_as_bytes(piece: Piece) -> None:
    sent = http.packed(piece)
    assert isinstance(sent, Head if isinstance(piece, Head) else bytes)
    assert http.unpacked(sent) == piece
