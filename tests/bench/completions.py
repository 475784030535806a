"""A client for benchmarks of HTTP servers: streamed answers, and when their tokens came."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from raykv.base.errors import RayKVError

ANSWER_S = 400.0


class AnswerError(RayKVError):
    """A server has answered with an error."""


@dataclass(frozen=True)
class Completion:
    """When a request was sent, and when each token came; seconds of one clock.

    `course`: what became of the prompt, where a proxy says so.
    """

    began: float
    tokens: tuple[float, ...]
    course: str | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.tokens[0] - self.began

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Times between tokens."""
        return tuple(b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False))


@dataclass(frozen=True)
class ModelServer:
    """A server at a port of this host; `model` is what it calls its model."""

    port: int
    model: str

    def complete(
        self,
        tokens: list[int],
        max_tokens: int,
        is_enough: Callable[[], bool] = lambda: False,
        **extra: Any,
    ) -> Completion:
        """Stream that many tokens, or until it is enough: then the request is aborted.

        Raises:
            AnswerError: the server refuses the request.
        """
        body = {
            "model": self.model,
            "prompt": tokens,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            **extra,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            began = time.monotonic()
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise AnswerError(f"status {answer.status}: {answer.read()[:500]!r}")
            times = []
            for at in _times(answer):
                times.append(at)
                if is_enough():
                    break
        return Completion(began, tuple(times), answer.getheader("x-raykv-prefill"))


def _times(answer: http.client.HTTPResponse) -> Iterator[float]:
    """When each piece of a stream of server-sent events with a token came."""
    for line in answer:
        if line.startswith(b"data: {") and json.loads(line[6:]).get("choices"):
            yield time.monotonic()
