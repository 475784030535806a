"""The benchmarks' HTTP client, against a played server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from raykv.lab.bench.completions import AnswerError, ModelServer

CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "to"}}]},
    {"choices": [{"delta": {"content": "ken"}}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
]
PLAIN = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}]}]


class Handler(BaseHTTPRequestHandler):
    """Answers as vLLM does."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked.append((self.path, body))
        self.send_response(200 if body["model"] == "model" else 404)
        self.send_header("x-raykv-prefill", "prefilled")
        self.end_headers()
        for piece in CHAT if "messages" in body else PLAIN:
            self.wfile.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: Any) -> None:
        pass


asked: list[tuple[str, dict[str, Any]]] = []


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_tokens_are_timed_and_what_became_of_the_prompt_is_told(port: int) -> None:
    done = ModelServer(port, "model").complete([1, 2], 2, kv_transfer_params={"raykv_load": False})
    assert (len(done.tokens), len(done.gaps_s), done.course) == (2, 1, "prefilled")
    assert 0 < done.ttft_s < 10
    path, body = asked[-1]
    assert path == "/v1/completions"
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ([1, 2], 2, True)
    assert body["kv_transfer_params"] == {"raykv_load": False}


def test_text_and_cached_tokens_of_a_chat_are_told(port: int) -> None:
    messages = [{"role": "user", "content": "ready?"}]
    done = ModelServer(port, "model").chat(messages, 3)
    assert (done.text, done.prompt_tokens, done.cached) == ("token", 9, 8)
    assert len(done.tokens) == 2
    assert asked[-1][0] == "/v1/chat/completions"
    assert asked[-1][1]["messages"] == messages


def test_refusal_is_an_error(port: int) -> None:
    with pytest.raises(AnswerError, match="status 404"):
        ModelServer(port, "other").complete([1], 1)
