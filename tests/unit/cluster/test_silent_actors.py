"""Who is waited for is said, once, and only where the wait is felt."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import ray
from typer.testing import CliRunner

import raykv
from raykv.base.errors import ClusterError, MessageError
from raykv.cli import app
from raykv.cluster import ask
from raykv.node.actor import CONCURRENCY, NodeActor


class Refs:
    """Answers of actors, by name, each after so many seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        began = time.monotonic()
        self.ready_at = {name: began + took for name, took in seconds.items()}
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "get", lambda ref, timeout: f"{ref} answers")

    def wait(
        self, refs: Sequence[str], num_returns: int, timeout: float
    ) -> tuple[list[str], list[str]]:
        assert num_returns == 1
        first = min(refs, key=self.ready_at.__getitem__)
        left = self.ready_at[first] - time.monotonic()
        threading.Event().wait(max(0.0, min(timeout, left)))
        if left > timeout:
            return [], list(refs)
        return [first], [ref for ref in refs if ref != first]

    def ask(self, deadline_s: float) -> dict[str, ask.Answer]:
        actors = {name: name for name in self.ready_at}
        questions = dict.fromkeys(actors, lambda actor: actor)
        return ask.ask_all(actors, questions, deadline_s)


def test_who_is_silent_keeps_no_other_answer_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Refs(monkeypatch, quick=0.0, slow=0.1, frozen=1e6).ask(0.5)
    assert answers["quick"].value == "quick answers"
    assert answers["slow"].value == "slow answers"
    assert answers["frozen"].error == "no answer within 0.5 s"


def test_actor_that_is_dead_is_told_from_one_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ref: str, timeout: float) -> None:
        raise {"dead": ray.exceptions.ActorDiedError(), "bad": ValueError(ref)}[ref]

    refs = Refs(monkeypatch, dead=0.0, bad=0.0)
    monkeypatch.setattr(ray, "get", fail)
    answers = refs.ask(1.0)
    assert {name: answer.is_dead for name, answer in answers.items()} == {
        "dead": True,
        "bad": False,
    }


def test_slow_disk_keeps_no_other_call_waiting() -> None:
    group = NodeActor.keep.__ray_concurrency_group__
    assert group in CONCURRENCY
    for other in (NodeActor.fetch, NodeActor.host):
        assert other.__ray_concurrency_group__ != group


def test_clear_says_on_standard_error_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Played:
        def __enter__(self) -> Played:
            return self

        def __exit__(self, *_: object) -> None: ...

        def clear(self, namespace: str | None, *, watch: Any) -> None:
            assert namespace == "5f0c"
            watch(["a" * 56, "b" * 56])

    monkeypatch.setattr(raykv, "connect", lambda _: Played())
    shown = CliRunner().invoke(app, ["clear", "5f0c", "--json"], catch_exceptions=False)
    assert shown.stdout.strip().endswith("}")
    assert "waiting for the NodeActor of aaaaaaaaaaaa, bbbbbbbbbbbb" in shown.stderr


def raised_there(cause: Exception) -> Exception:
    """As Ray raises it here."""
    error = ray.exceptions.RayTaskError("method", "Traceback\nline", cause)
    made: Exception = error.as_instanceof_cause()
    return made


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ClusterError("RayKV does not run"), "RayKV does not run"),
        (ray.exceptions.GetTimeoutError("late\n"), "it does not answer in time"),
        (
            raised_there(ray.exceptions.GetTimeoutError("late")),
            "it does not answer: GetTimeoutError: late",
        ),
        (MessageError("not readable here"), "it does not answer: MessageError: not readable here"),
        (raised_there(MessageError("a pin for 0 s")), "it refuses it: a pin for 0 s"),
        (raised_there(KeyError("k")), "it does not answer: KeyError: 'k'"),
    ],
)
def test_whatever_goes_wrong_with_a_question_is_one_sentence(
    error: Exception, sentence: str
) -> None:
    with pytest.raises(ClusterError) as raised, ask.answering("it"):
        raise error
    assert str(raised.value) == sentence
