"""The names of routing policies, and what Ray's prefix-aware router is told of a request."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.serve.app import router_config
from raykv.serve.arguments import ModelArguments
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.prefix_router import PrefixRouter


@pytest.mark.parametrize(
    ("policy", "name"),
    [("kv", "KVRouter"), ("prefix", "PrefixRouter"), ("round_robin", "RoundRobinRouter")],
)
def test_policy_is_a_router_of_serve(policy: str, name: str) -> None:
    model = ModelArguments(model="m", router={"policy": policy})  # type: ignore[arg-type]
    config = router_config(model)
    assert config.get_request_router_class().__name__ == name
    # Serve sends it to other processes as JSON.
    assert json.loads(json.dumps(config.request_router_kwargs)) == config.request_router_kwargs


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "a text"}, "a text"),
        ({"prompt": ["one", "two"]}, "onetwo"),
        ({"prompt": [1, 2, 3]}, ""),
        ({"messages": [{"content": "hello"}, {"content": [{"text": " you"}]}]}, "hello you"),
        ({}, ""),
        (["no", "object"], ""),
        (b"no JSON", ""),
        (b"[" * 100_000, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_prefix_router_sees_the_text_of_a_request(body: Any, text: str) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    pending = SimpleNamespace(args=[HttpRequest("POST", "/", b"", [], raw)])
    router = PrefixRouter.__new__(PrefixRouter)
    assert router._text(pending) == text
    assert router._text(SimpleNamespace(args=[])) == ""
