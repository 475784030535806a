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

    Of the prompt's tokens `cached` were not computed, where the server says so. `course`: what
    became of the prompt, where a proxy says so.
    """

    began: float
    tokens: tuple[float, ...]
    course: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    cached: int = 0

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
        request = {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, **extra}
        return self._stream("/v1/completions", request, is_enough)

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Completion:
        """Stream at most that many tokens; the server counts those of the prompt.

        Raises:
            AnswerError: the server refuses the request.
        """
        return self._stream(
            "/v1/chat/completions",
            {
                "messages": messages,
                "max_tokens": max_tokens,
                "stream_options": {"include_usage": True},
            },
        )

    def _stream(
        self, path: str, request: dict[str, Any], is_enough: Callable[[], bool] = lambda: False
    ) -> Completion:
        body = {"model": self.model, "temperature": 0, "stream": True, **request}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        with closing(connection):
            headers = {"Content-Type": "application/json"}
            began = time.monotonic()
            connection.request("POST", path, json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise AnswerError(f"status {answer.status}: {answer.read()[:500]!r}")
            pieces = []
            for piece in _pieces(answer):
                pieces.append(piece)
                if is_enough():
                    break
        deltas = [
            (at, choice.get("delta", {}))
            for at, piece in pieces
            for choice in piece.get("choices", ())
        ]
        usage: dict[str, Any] = next((p["usage"] for _, p in pieces if p.get("usage")), {})
        return Completion(
            began,
            # A chat begins with a piece that only says who speaks.
            tuple(at for at, delta in deltas if "role" not in delta),
            answer.getheader("x-raykv-prefill"),
            text="".join(delta.get("content") or "" for _, delta in deltas),
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )


def _pieces(answer: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    """The pieces of a stream of server-sent events, and when they came."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield time.monotonic(), json.loads(line[6:])
