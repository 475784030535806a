"""The proxy between prefill and decode engines, with engines that are scripts."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from ray.exceptions import ActorDiedError

import raykv.serve.disaggregated.proxy as proxy
from raykv.serve.disaggregated.proxy import COURSE_HEADER, DisaggregatedBackend
from raykv.serve.disaggregated.requests import Course, Handover
from raykv.serve.http.exchange import COMPLETIONS, Head, HttpRequest, Piece, Pieces
from raykv.serve.http.metrics import ReplicaMetrics
from raykv.vllm.transcript import Delta
from tests.fixtures.waiting import until

Script = Callable[[], Awaitable[int]]


async def well() -> int:
    return 200


async def refuse() -> int:
    return 400


async def die() -> int:
    await asyncio.sleep(0)
    raise ActorDiedError


async def hang() -> int:
    await asyncio.Event().wait()
    return 200


@dataclass
class Engine:
    """Answers with the status that its script gives; a probe with that of `probed`."""

    script: Script = well
    probed: Script = well
    requests: list[dict[str, Any]] = field(default_factory=list)
    known: list[Any] = field(default_factory=list)
    num_probes: int = 0
    num_left: int = 0

    async def metrics(self) -> list[ReplicaMetrics]:
        if self.script is die:
            raise TimeoutError
        return [ReplicaMetrics("d", str(id(self)), "")]

    async def answer(self, request: HttpRequest) -> Pieces:
        body = json.loads(request.body)
        is_probe = body["prompt"] == [1]
        self.num_probes += is_probe
        if not is_probe:
            self.requests.append(body)
            self.known.append(request.known)
        try:
            status = await (self.probed if is_probe else self.script)()
            yield Head(status, [(b"x-own", b"1")])
            yield b"one"
            yield b"two"
        except (asyncio.CancelledError, GeneratorExit):
            self.num_left += 1
            raise


@dataclass
class Pair:
    """Both kinds of engines, and what was counted."""

    prefill: Engine = field(default_factory=Engine)
    decode: Engine = field(default_factory=Engine)
    courses: list[Course] = field(default_factory=list)
    deadline_s: float = 20.0

    def __post_init__(self) -> None:
        rules = Handover(min_prompt_tokens=4, prefill_deadline_s=self.deadline_s)
        self.backend = DisaggregatedBackend(
            "m", self.prefill, self.decode, rules, self.courses.append
        )

    def begin(self, length: int = 4) -> Pieces:
        body = json.dumps({"prompt": [7] * length}).encode()
        return self.backend.answer(HttpRequest("POST", COMPLETIONS, b"", [], body))

    async def ask(self, length: int = 4) -> list[Piece]:
        return [piece async for piece in self.begin(length)]


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "PREFILL_PROBE_S", 0.05)
    monkeypatch.setattr("raykv.base.deadlines.AGAIN_S", 0.001)


async def test_decode_engine_is_asked_once_the_prefill_engine_has_answered() -> None:
    pair, may_end = Pair(), asyncio.Event()

    async def wait() -> int:
        await may_end.wait()
        return 200

    pair.prefill.script = wait
    asked = asyncio.create_task(pair.ask())
    await until(lambda: len(pair.prefill.requests) == 1)
    assert pair.decode.requests == []
    may_end.set()
    assert await asked == [
        Head(200, [(b"x-own", b"1"), (COURSE_HEADER, b"prefilled")]),
        b"one",
        b"two",
    ]
    assert pair.prefill.requests[0]["max_tokens"] == 1
    assert pair.decode.requests[0]["kv_transfer_params"] == {"raykv_prefilled": True}
    assert pair.courses == [Course.PREFILLED]


async def test_rest_of_an_answer_goes_to_a_decode_engine_alone() -> None:
    pair = Pair()
    known = (Delta((1, 2)),)
    body = json.dumps({"prompt": [7] * 4}).encode()
    request = HttpRequest("POST", COMPLETIONS, b"", [], body, known)
    assert [piece async for piece in pair.backend.answer(request)] == [
        Head(200, [(b"x-own", b"1")]),
        b"one",
        b"two",
    ]
    assert (pair.prefill.requests, pair.courses) == ([], [])
    assert pair.decode.known == [known]


async def test_short_prompt_never_sees_a_prefill_engine() -> None:
    pair = Pair()
    await pair.ask(3)
    assert (pair.prefill.requests, pair.courses) == ([], [Course.SHORT])
    assert "kv_transfer_params" not in pair.decode.requests[0]


@pytest.mark.parametrize(("script", "course"), [(die, Course.LOST), (hang, Course.LATE)])
async def test_prefill_engine_that_fails_is_left_alone_until_it_answers_again(
    script: Script, course: Course, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(Engine(script, probed=script), deadline_s=0.3)
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        await asyncio.gather(*(pair.ask() for _ in range(3)))
    assert pair.courses == [course] * 3
    # What is late is taken back.
    assert pair.prefill.num_left == (3 if course is Course.LATE else 0)
    await pair.ask()
    assert pair.courses[3:] == [Course.SKIPPED]
    assert len(pair.decode.requests) == 4
    assert all("kv_transfer_params" not in each for each in pair.decode.requests)
    assert len(caplog.records) == 1, caplog.text
    await until(lambda: pair.prefill.num_probes > 1)
    await pair.ask()
    assert pair.courses[4:] == [Course.SKIPPED]
    pair.prefill.script = pair.prefill.probed = well
    await until(lambda: pair.backend._return is None)
    await pair.ask()
    assert pair.courses[5:] == [Course.PREFILLED]


async def test_refused_prefill_is_the_decode_engines_to_explain_and_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair(Engine(refuse), Engine(refuse))
    with caplog.at_level(logging.WARNING, logger="ray.serve"):
        for _ in range(2):
            head, *_ = await pair.ask()
            assert head == Head(400, [(b"x-own", b"1"), (COURSE_HEADER, b"refused")])
    assert pair.courses == [Course.REFUSED] * 2
    assert len(pair.prefill.requests) == 2
    assert len(caplog.records) == 1, caplog.text


async def test_client_that_leaves_during_the_prefill_takes_its_request_back() -> None:
    pair = Pair(Engine(hang))
    asked = asyncio.create_task(pair.ask())
    await until(lambda: len(pair.prefill.requests) == 1)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert (pair.prefill.num_left, pair.decode.requests) == (1, [])
    assert pair.backend._return is None, "that says nothing about the engine"


async def test_client_that_leaves_during_the_answer_takes_its_request_back() -> None:
    pair = Pair()
    pieces: Any = pair.begin()
    assert isinstance(await anext(pieces), Head)
    await pieces.aclose()
    assert pair.decode.num_left == 1


async def test_decode_engine_that_dies_is_the_callers_to_replace() -> None:
    pair = Pair(decode=Engine(die))
    with pytest.raises(ActorDiedError):
        await pair.ask()


def test_metrics_are_those_of_both_kinds_of_engines_that_answer() -> None:
    pair = Pair()
    assert len(asyncio.run(pair.backend.metrics())) == 2
    pair.prefill.script = die
    (page,) = asyncio.run(pair.backend.metrics())
    assert page.replica == str(id(pair.decode))
