"""Answers whose replicas die: what the client gets, and what the next replica is asked."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from raykv.serve.http import answer
from raykv.serve.http import ingress as module
from raykv.serve.http.exchange import COMPLETIONS, Head, HttpRequest, MadePiece
from raykv.serve.http.ingress import (
    BrokenAnswerError,
    NoReplicaError,
    ReplicaBackend,
    SilentReplicaError,
)
from raykv.vllm.transcript import Delta, Deltas
from tests.fixtures.asgi import Client
from tests.fixtures.replicas import EVENTS, Replicas, ask, asking, error_of, ingress
from tests.fixtures.serve_handle import Handle, Pieces

DIED = ActorDiedError()
ALIVE = b""
HEAD = Head(200, EVENTS)
JSON = Head(200, [(b"content-type", b"application/json")])


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.LOOK_S", 0.0)


def event(token: int, answer: str, **more: Any) -> bytes:
    """What vLLM sends of a token; id and time are the replica's."""
    body = {"id": answer, "created": ord(answer), "choices": [{"text": f"<{token}>"}], **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def made(*tokens: int, answer: str = "a", why_not: str = "") -> MadePiece:
    """A piece with the event of tokens that the engine has made at once."""
    return MadePiece(event(tokens[-1], answer), (Delta(tokens),), why_not)


def events_of(client: Client) -> list[Any]:
    events = client.text.removesuffix("\n\n").split("\n\n")
    return [json.loads(each.removeprefix("data: ")) for each in events]


def known(*deltas: tuple[int, ...]) -> tuple[Delta, ...]:
    return tuple(map(Delta, deltas))


# Goes on


def test_client_sees_one_answer_and_next_replica_gets_what_is_known() -> None:
    rest = [event(1, "b"), event(3, "b"), made(4, answer="b"), b"data: [DONE]\n\n"]
    replicas = Replicas([ALIVE, HEAD, made(1), made(2, 3), ALIVE, DIED], [ALIVE, HEAD, *rest])
    client = ask(ingress(replicas), asking())
    whole = b"".join([event(1, "a"), event(3, "a"), event(4, "a"), b"data: [DONE]\n\n"])
    assert (client.status, client.text, client.is_whole) == (200, whole.decode(), True)
    first, second = replicas.asked
    assert (first.known, second.known) == ((), known((1,), (2, 3)))
    assert second.body == first.body


def test_what_the_engine_has_made_and_nobody_has_seen_is_known_too() -> None:
    unseen = MadePiece(b"", known((2,), (3,)), "")
    dying = [ALIVE, HEAD, made(1), unseen, DIED]
    replicas = Replicas(dying, [HEAD, event(1, "b"), event(2, "b"), event(3, "b")])
    client = ask(ingress(replicas), asking())
    assert client.text.encode() == event(1, "a") + event(2, "a") + event(3, "a")
    assert replicas.asked[1].known == known((1,), (2,), (3,))


def test_answer_that_is_no_stream_goes_on_and_comes_as_the_last_replica_has_it() -> None:
    dying = [ALIVE, MadePiece(b"", known((1, 2)), ""), DIED]
    replicas = Replicas(dying, [ALIVE, JSON, b'{"id":"b"}'])
    client = ask(ingress(replicas), asking())
    assert (client.status, client.text) == (200, '{"id":"b"}')
    assert replicas.asked[1].known == known((1, 2))


def test_comments_that_keep_a_connection_alive_are_no_pieces_of_the_answer() -> None:
    ping = b": keep-alive\n\n"
    again = [HEAD, event(1, "b"), ping, event(2, "b"), made(3, answer="b")]
    replicas = Replicas([HEAD, made(1), ping, ping, made(2), DIED], again)
    client = ask(ingress(replicas), asking())
    tokens = [each for each in client.text.split("\n\n") if each.startswith("data: ")]
    assert [f"<{number}>" in each for number, each in enumerate(tokens, 1)] == [True] * 3


def test_head_is_that_of_the_replica_whose_body_comes() -> None:
    first, second = (Head(200, [(b"content-length", each)]) for each in (b"9", b"3"))
    replicas = Replicas([MadePiece(b"", known((1,)), ""), first, DIED], [second, b"{1}"])
    client = ask(ingress(replicas), asking())
    assert (client.answered[b"content-length"], client.text) == (b"3", "{1}")


def test_answer_without_a_body_has_its_head() -> None:
    assert ask(ingress(Replicas([ALIVE, Head(204, [])])), asking()).status == 204


@pytest.mark.parametrize("text", [b"data: no JSON\n\n", b"data: [1]\n\n", b"x"])
def test_pieces_that_are_no_events_of_an_answer_are_passed_on_as_they_are(text: bytes) -> None:
    replicas = Replicas([HEAD, made(1), DIED], [HEAD, event(1, "b"), text, made(2, answer="b")])
    client = ask(ingress(replicas), asking())
    assert client.text.encode() == event(1, "a") + text + event(2, "a")


def test_silent_replica_is_left_for_another() -> None:
    gone = SilentReplicaError("nothing")
    replicas = Replicas([HEAD, made(1), gone], [HEAD, event(1, "b"), made(2, answer="b")])
    assert ask(ingress(replicas), asking()).text.encode() == event(1, "a") + event(2, "a")


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=3), max_size=5))
def test_steps_are_kept_as_they_came(tokens: list[list[int]]) -> None:
    given_deltas = [Delta(tuple(each)) for each in tokens]
    if given_deltas:
        given_deltas[-1] = given_deltas[-1]._replace(finish_reason="stop", stop_reason="\n")
    deltas = Deltas()
    for each in given_deltas:
        deltas.add([each])
    assert list(deltas) == given_deltas


# Does not go on


def check_ends(client: Client, passed: bytes, reason: str) -> None:
    """What was passed on, then an error that says why there is no more."""
    assert client.text.startswith(passed.decode())
    (last,) = client.text.removeprefix(passed.decode()).removesuffix("\n\n").split("\n\n")
    error = json.loads(last.removeprefix("data: "))["error"]
    assert reason in error["message"]
    assert error["code"] == 503
    assert client.is_whole


def test_answer_that_no_other_replica_can_make_says_why() -> None:
    replicas = Replicas([HEAD, made(1, why_not="because of n"), DIED])
    check_ends(ask(ingress(replicas), asking()), event(1, "a"), "because of n; ask again")
    assert len(replicas.asked) == 1


@pytest.mark.parametrize("why_not", ["because of n", ""])
def test_answer_of_which_nothing_was_passed_on_begins_anew_if_it_can_not_go_on(
    why_not: str,
) -> None:
    """Without a reason: its route is none of those whose answers go on."""
    client = asking()
    client.path = "/v1/completions" if why_not else "/v1/responses"
    dying = [MadePiece(b"", known((1,)), ""), MadePiece(b"", (), why_not), DIED]
    replicas = Replicas(dying, [JSON, b"whole"])
    assert ask(ingress(replicas), client).text == "whole"
    assert replicas.asked[1].known == ()


def test_other_routes_streams_do_not_go_on() -> None:
    client = asking()
    client.path = "/v1/responses"
    replicas = Replicas([HEAD, made(1), DIED])
    check_ends(ask(ingress(replicas), client), event(1, "a"), "only completions and chats")


def test_longer_answer_than_the_bound_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST_TOKENS", 2)
    passed = [made(1), made(2), made(3)]
    check_ends(
        ask(ingress(Replicas([HEAD, *passed, DIED])), asking()),
        b"".join(each.body for each in passed),
        "more than 2 tokens",
    )
    fits = Replicas([HEAD, *passed[:2], DIED], [HEAD, event(1, "b"), event(2, "b"), event(3, "b")])
    assert len(events_of(ask(ingress(fits), asking()))) == 3


IN_STREAM = [HEAD, b'data: {"error":{"message":"vLLM\'s words"}}\n\n', b"data: [DONE]\n\n"]


@pytest.mark.parametrize("refusal", [[Head(400, []), b"vLLM's words"], IN_STREAM])
@pytest.mark.parametrize("num_passed", [1, 2, 3])
def test_replica_that_refuses_to_continue_is_quoted(refusal: list[Any], num_passed: int) -> None:
    passed = [made(token) for token in range(num_passed)]
    replicas = Replicas([HEAD, *passed, DIED], [ALIVE, *refusal])
    whole = b"".join(each.body for each in passed)
    check_ends(ask(ingress(replicas), asking()), whole, "vLLM's words")


def test_no_more_is_kept_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "MOST_TOKENS", 2)
    kept = answer.ContinuedAnswer(HttpRequest("POST", COMPLETIONS, b"", [], b""))
    for token in range(10):
        kept.heard(made(token))
    assert kept.num_tokens == 3


def test_answer_that_comes_out_shorter_is_no_whole_answer() -> None:
    replicas = Replicas([HEAD, made(1), made(2), DIED], [HEAD, event(1, "b")])
    both = event(1, "a") + event(2, "a")
    check_ends(ask(ingress(replicas), asking()), both, "made another answer")


def test_answer_that_nobody_can_say_an_error_in_is_cut() -> None:
    client = asking()
    with pytest.raises(BrokenAnswerError, match="its tokens are not known"):
        ask(ingress(Replicas([JSON, b'{"half":', DIED])), client)
    assert not client.is_whole


# How often, how long


@pytest.mark.parametrize(("limits", "most"), [({}, 2), ({"attempts": 1}, 1), ({"attempts": 3}, 3)])
def test_request_that_kills_its_replicas_is_given_to_so_many(
    limits: dict[str, int], most: int
) -> None:
    replicas = Replicas([ALIVE, DIED])
    client = ask(ingress(replicas, **limits), asking())
    assert (client.status, client.answered[b"retry-after"]) == (503, b"5")
    assert f"{most} replicas died with this request" in error_of(client)
    assert len(replicas.asked) == most


def test_request_does_not_kill_replicas_that_get_far_with_it() -> None:
    far = MadePiece(b"", known((1,) * module.FAR_TOKENS), "")
    dying = [far, DIED]
    replicas = Replicas(*[dying] * 4, [HEAD, event(1, "b")])
    assert ask(ingress(replicas), asking()).status == 200
    near = MadePiece(b"", known((1,) * (module.FAR_TOKENS - 1)), "")
    replicas = Replicas([near, DIED], [near, DIED], [HEAD, event(1, "b")])
    assert ask(ingress(replicas), asking()).status == 503


def test_time_that_an_answer_took_does_not_count_when_another_replica_is_looked_for() -> None:
    dying = [HEAD, made(1), 1.2, DIED]
    replicas = Replicas(dying, [DIED], [HEAD, event(1, "b"), made(2, answer="b")])
    client = ask(ingress(replicas, replica_wait_s=1.0), asking())
    assert client.text.encode() == event(1, "a") + event(2, "a")


def test_replica_that_was_dead_before_it_had_the_request_does_not_count() -> None:
    replicas = Replicas(
        [DIED], [DIED], [DIED], [HEAD, made(1), DIED], [DIED], [HEAD, event(1, "b")]
    )
    assert ask(ingress(replicas), asking()).text.encode() == event(1, "a")


def test_request_that_only_dead_replicas_get_is_refused_in_time() -> None:
    client = ask(ingress(Replicas([DIED]), replica_wait_s=0.01), asking())
    assert client.status == 503
    assert "died before they took" in error_of(client)


def test_stream_says_if_no_replica_takes_the_rest() -> None:
    replicas = Replicas([HEAD, made(1), DIED], [NoReplicaError("none in 60 s")])
    check_ends(ask(ingress(replicas), asking()), event(1, "a"), "none in 60 s")


async def test_client_that_leaves_in_the_pause_ends_all_attempts() -> None:
    client = asking()
    replicas = Replicas([HEAD, made(1), DIED], [ALIVE, asyncio.Event()])
    task = asyncio.create_task(client.ask(ingress(replicas)))
    await client.heard(1)
    while len(replicas.asked) < 2:
        await asyncio.sleep(0)
    client.leave()
    await task
    assert replicas.ended == 2
    assert not client.is_whole


async def test_replica_that_sends_nothing_at_all_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REPLICA_SILENCE_S", 0.02)
    pieces = Pieces(HEAD, asyncio.Event())
    pieces.is_taken.set()
    request = HttpRequest("POST", COMPLETIONS, b"", [], b"")
    answered = ReplicaBackend(Handle(pieces)).answer(request)
    assert await anext(answered) == HEAD
    with pytest.raises(SilentReplicaError, match=r"nothing for 0\.02 s"):
        await anext(answered)
    assert pieces.is_cancelled
