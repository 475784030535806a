"""An answer goes on in another replica when its own dies: the client sees a pause, and no more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from raykv.client.cluster import Cluster
from raykv.lab.demo.tiny_llama import tiny_llama
from tests.fixtures import processes
from tests.fixtures.ray_serve import (
    START_DEADLINE_S,
    TEXT,
    Served,
    engines,
    replicas,
    serving,
)
from tests.fixtures.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(400)]

BLOCK = 32
TOKENS = 500
SLOW = {"layers": 24, "hidden_size": 512, "heads": 8}
SHORT_S, SILENT_S = 20.0, 30.0
"""The longest pause: with a replica that dies, and with one that falls silent for ten seconds. On
two cores the next replica computes while the successor starts, which takes seconds now and then."""


@pytest.fixture(scope="module")
def served(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")

    def change(args: dict[str, Any]) -> None:
        (general,) = [model for model in args["models"] if model["name"] == "general"]
        # An answer takes seconds.
        general["model"] = str(tiny_llama(folder / "slow", vocab_size=VOCAB_SIZE, **SLOW))
        write_tiny_tokenizer(folder / "slow")
        general["engine_args"]["enable_prompt_tokens_details"] = True
        general["deployment"]["graceful_shutdown_timeout_s"] = 1.0

    with serving(cluster, folder, change) as running:
        yield running


def asked(text: str, **more: Any) -> dict[str, Any]:
    asks: dict[str, Any] = {"model": "general", "prompt": text, "max_tokens": TOKENS}
    return asks | {"temperature": 0, "extra_body": {"ignore_eos": True}} | more


def are_up() -> bool:
    """Whether both replicas take requests."""
    from ray import serve

    general = serve.status().applications["raykv"].deployments["general"]
    return dict(general.replica_states) == {"RUNNING": 2}


def busy() -> psutil.Process:
    """The replica whose engine computes now."""
    both = engines("general")
    before = [sum(each.cpu_times()[:2]) for each in both]
    time.sleep(1.0)
    used = [sum(each.cpu_times()[:2]) - was for each, was in zip(both, before, strict=True)]
    engine = both[used.index(max(used))]
    (replica,) = [each for each in replicas("general") if engine in each.children(recursive=True)]
    return replica


def kill(replica: psutil.Process) -> None:
    replica.kill()


def end_engine(replica: psutil.Process) -> None:
    """It aborts its requests before it ends."""
    (engine,) = [each for each in replica.children(True) if each in engines("general")]
    engine.terminate()


def freeze(replica: psutil.Process) -> None:
    for each in [replica, *replica.children(recursive=True)]:
        processes.freeze(each.pid)


@contextmanager
def hitting(fault: Callable[[psutil.Process], None]) -> Iterator[Callable[[], None]]:
    """What happens to the replica that answers."""
    wait_until(are_up, START_DEADLINE_S, "both replicas are there")
    hit: list[psutil.Process] = []

    def happen() -> None:
        hit.append(busy())
        fault(hit[0])

    yield happen
    if fault is freeze:
        # Serve would find it by itself, some time.
        hit[0].kill()
    wait_until(lambda: not are_up(), 10.0, "Serve knows")


@dataclass
class Answer:
    """What a client has seen of a stream."""

    text: str = ""
    ids: set[tuple[str, int]] = field(default_factory=set)
    reasons: list[str] = field(default_factory=list)
    usage: Any = None
    pauses_s: list[float] = field(default_factory=list)


def streamed(events: Any, then: Callable[[], None], at: int) -> Answer:
    """Read a stream; `then` happens when so many events are there."""
    answer, since = Answer(), 0.0
    for number, event in enumerate(events):
        if number:
            answer.pauses_s.append(time.monotonic() - since)
        answer.ids.add((event.id, event.created))
        answer.usage = event.usage or answer.usage
        for choice in event.choices:
            answer.text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            answer.reasons += [choice.finish_reason] if choice.finish_reason else []
        if number == at:
            then()
        since = time.monotonic()
    return answer


def check_goes_on(seen: Answer, expected: Any, longest_s: float) -> None:
    """As if nothing had happened, but for a pause; usage says what was loaded and computed."""
    assert seen.reasons == ["length"]
    assert len(seen.ids) == 1
    print(f"longest pauses: {sorted(seen.pauses_s)[-4:]}; {seen.usage.prompt_tokens_details}")
    assert max(seen.pauses_s) < longest_s
    assert seen.usage.completion_tokens == TOKENS
    assert seen.usage.prompt_tokens == expected.usage.prompt_tokens
    details = seen.usage.prompt_tokens_details
    assert details.cached_tokens <= seen.usage.prompt_tokens
    sources = details.raykv_sources
    known = sum(sources.values()) - seen.usage.prompt_tokens
    assert 0 < known < TOKENS
    assert sources["computed"] <= 2 * BLOCK


@pytest.mark.parametrize(
    ("fault", "at", "longest_s"),
    [(kill, 0, SHORT_S), (end_engine, 60, SHORT_S), (freeze, 60, SILENT_S)],
)
def test_completion_goes_on(
    served: Served, fault: Callable[[psutil.Process], None], at: int, longest_s: float
) -> None:
    create, text = served.client.completions.create, f"{fault.__name__}. {TEXT}"
    with hitting(fault) as happen:
        events = create(**asked(text), stream=True, stream_options={"include_usage": True})
        seen = streamed(events, happen, at)
    expected = create(**asked(text))
    assert seen.text == expected.choices[0].text
    check_goes_on(seen, expected, longest_s)


def test_answer_that_is_no_stream_goes_on(served: Served) -> None:
    create = served.client.completions.create
    with hitting(kill) as happen, ThreadPoolExecutor(1) as threads:
        answer = threads.submit(create, **asked(TEXT))
        time.sleep(1.0)
        happen()
        seen = answer.result(60)
    assert seen.choices[0].text == create(**asked(TEXT)).choices[0].text
    assert seen.usage.completion_tokens == TOKENS
    assert sum(seen.usage.prompt_tokens_details.raykv_sources.values()) > seen.usage.prompt_tokens


def test_chat_that_can_not_go_on_says_why(served: Served) -> None:
    import openai

    messages = [{"role": "user", "content": TEXT}]
    with hitting(kill) as happen:
        events = served.client.chat.completions.create(
            model="general",
            messages=messages,
            max_tokens=TOKENS,
            presence_penalty=0.5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(openai.APIError, match="presence_penalty; ask again"):
            streamed(events, happen, 5)


def test_answers_outlive_a_replica_that_is_taken_away(served: Served) -> None:
    """In the second that it gets to end its requests, it does not end these."""
    texts = [f"{number}. {TEXT}" for number in range(2)]
    create = served.client.completions.create
    wait_until(are_up, START_DEADLINE_S, "both replicas are there")

    def stream(text: str) -> Answer:
        options = {"include_usage": True}
        return streamed(create(**asked(text), stream=True, stream_options=options), lambda: None, 0)

    with ThreadPoolExecutor(2) as threads:
        streams = [threads.submit(stream, text) for text in texts]
        time.sleep(0.5)
        served.application["deployments"] = [{"name": "general", "num_replicas": 1}]
        served.deploy()
        answers = [each.result(60) for each in streams]
    known = [
        sum(each.usage.prompt_tokens_details.raykv_sources.values()) - each.usage.prompt_tokens
        for each in answers
    ]
    assert max(known) > 0, "one of them was continued"
    for seen, text in zip(answers, texts, strict=True):
        assert (seen.text, seen.reasons) == (create(**asked(text)).choices[0].text, ["length"])
        assert seen.usage.completion_tokens == TOKENS
