"""Who chose a replica hears once that the answer has begun, and nothing after its end."""

from __future__ import annotations

from functools import partial

from raykv.serve.http.exchange import HttpRequest
from raykv.serve.http.starts import AnswerStarts


def asked() -> HttpRequest:
    return HttpRequest("POST", "/v1/completions", b"", [], b"{}")


def test_start_is_told_once_to_who_watches_that_request() -> None:
    starts, heard, one, other = AnswerStarts(), list[str](), asked(), asked()
    starts.watch(one, partial(heard.append, "one"))
    starts.watch(other, partial(heard.append, "other"))
    starts.began(other)
    starts.began(other)
    assert heard == ["other"]
    assert len(starts) == 1


def test_answer_that_has_ended_is_forgotten() -> None:
    starts, heard, one = AnswerStarts(), list[str](), asked()
    starts.watch(one, partial(heard.append, "one"))
    starts.forget(one)
    starts.forget(one)
    starts.began(one)
    assert (heard, len(starts)) == ([], 0)
