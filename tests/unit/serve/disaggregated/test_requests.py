"""A request's forms for prefill and decode engines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.serve.disaggregated.requests import (
    PARAMS,
    Course,
    Handover,
    num_tokens,
    probe,
    split,
)
from raykv.serve.http.exchange import CHAT, COMPLETIONS, MESSAGES, RESPONSES, HttpRequest

ALWAYS = Handover(min_prompt_tokens=0, bytes_per_token=1.0, pin_s=20.0)
HEADERS = [(b"content-type", b"application/json"), (b"Content-Length", b"7"), (b"x-a", b"b")]


def request(body: Any, path: str = COMPLETIONS, method: str = "POST") -> HttpRequest:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpRequest(method, path, b"", HEADERS, raw)


def parsed(made: HttpRequest | None) -> dict[str, Any]:
    assert made is not None
    assert dict(made.headers)[b"content-length"] == str(len(made.body)).encode()
    assert [name.lower() for name, _ in made.headers].count(b"content-length") == 1
    assert (b"x-a", b"b") in made.headers
    body: dict[str, Any] = json.loads(made.body)
    return body


HELLO = [{"role": "user", "content": "hello"}]
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    CHAT: (
        {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "tool_choice": "auto",
            "cache_salt": "mine",
            "chat_template_kwargs": {"thinking": True},
            "response_format": {"type": "text"},
            "priority": 3,
        },
        {
            "max_completion_tokens": 900,
            "max_tokens": 900,
            "min_tokens": 5,
            "n": 4,
            "logprobs": True,
            "top_logprobs": 3,
            "use_beam_search": False,
            "stop": ["."],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"max_tokens": 1, "max_completion_tokens": 1, "n": 1},
    ),
    MESSAGES: (
        {
            "system": "s",
            "messages": HELLO,
            "tools": [{"name": "f", "input_schema": {}}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        {"max_tokens": 900, "stop_sequences": ["."], "stream": True},
        {"max_tokens": 1},
    ),
    RESPONSES: (
        {
            "instructions": "s",
            "input": HELLO,
            "tools": [{"type": "function", "name": "f"}],
            "reasoning": {"effort": "low"},
        },
        {
            "background": True,
            "store": True,
            "stream": True,
            "max_output_tokens": 900,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 3,
        },
        {"max_output_tokens": 1, "background": False, "store": False},
    ),
}
"""By path: what the prompt follows from, what the answer, and what one token is asked for with."""


@pytest.mark.parametrize("path", FORMS)
def test_prefill_form_asks_for_one_token_of_the_same_prompt(path: str) -> None:
    prompt, answer, one = FORMS[path]
    asked = request({"model": "m", **prompt, **answer}, path)
    forms = split(asked, ALWAYS)
    prefill = {"model": "m", **prompt, **one, "stream": False, PARAMS: {"raykv_pin_s": 20.0}}
    decode = {"model": "m", **prompt, **answer, PARAMS: {"raykv_prefilled": True}}
    assert (parsed(forms.prefill), parsed(forms.decode)) == (prefill, decode)
    assert (forms.plain, forms.reason) == (asked, Course.PREFILLED)


def test_clients_wishes_reach_the_decode_engine_only() -> None:
    sent = {"raykv_pin_s": 9.0, "raykv_load": True, "do_remote_prefill": True, "remote_host": "h"}
    forms = split(request({"prompt": [1, 2], PARAMS: sent}), ALWAYS)
    assert parsed(forms.prefill)[PARAMS] == {"raykv_pin_s": 20.0}
    assert parsed(forms.decode)[PARAMS] == {**sent, "raykv_prefilled": True}


@pytest.mark.parametrize("length", [9, 10])
def test_short_prompt_is_not_handed_over_even_if_its_client_says_that_it_was_prefilled(
    length: int,
) -> None:
    body = {"prompt": [1] * length, PARAMS: {"raykv_prefilled": True, "raykv_load": True}}
    forms = split(request(body), Handover(min_prompt_tokens=10))
    assert parsed(forms.plain) == {"prompt": [1] * length, PARAMS: {"raykv_load": True}}
    if length == 9:
        assert (forms.prefill, forms.decode) == (None, forms.plain)
        assert forms.reason is Course.SHORT
    else:
        assert forms.reason is Course.PREFILLED
        assert forms.prefill is not None


def test_without_a_pin_nothing_is_wished_for() -> None:
    forms = split(request({"prompt": [1, 2]}), Handover(min_prompt_tokens=0, pin_s=0))
    assert parsed(forms.prefill)[PARAMS] == {}


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        (COMPLETIONS, {"prompt_logprobs": 0}),
        (COMPLETIONS, {"prompt_embeds": "AAAA"}),
        (COMPLETIONS, {"truncate_prompt_tokens": 10}),
        (COMPLETIONS, {"echo": True, "logprobs": 1}),
        (COMPLETIONS, {PARAMS: {"raykv_load": False}}),
        (COMPLETIONS, {PARAMS: {"raykv_store": False}}),
        (COMPLETIONS, {PARAMS: [1]}),
        (RESPONSES, {"previous_response_id": "resp_1"}),
        (RESPONSES, {"truncation": "auto"}),
    ],
)
def test_request_that_cannot_use_the_cache_is_left_to_the_decode_engine(
    path: str, extra: dict[str, Any]
) -> None:
    made = request({"prompt": [1, 2], "input": "x", **extra}, path)
    forms = split(made, ALWAYS)
    assert (forms.prefill, forms.reason) == (None, Course.UNSUITABLE)
    assert forms.decode == forms.plain == made


@pytest.mark.parametrize(
    "made",
    [
        request({"input": "x"}, "/v1/embeddings"),
        request(b"", "/v1/models", "GET"),
        request({"prompt": "x"}, COMPLETIONS, "PUT"),
        request(b"{"),
        request(b"\xff\xfe"),
        request([1, 2]),
        request("text"),
        request(b"[" * 100_000),
        request(b'{"prompt":' + b"[" * 100_000),
        request(b'{"n":' + b"9" * 10_000 + b"}"),
    ],
)
def test_what_is_no_completion_goes_on_as_it_is(made: HttpRequest) -> None:
    forms = split(made, ALWAYS)
    assert (forms.plain, forms.decode, forms.prefill) == (made, made, None)
    assert forms.reason is Course.UNSUITABLE


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        (COMPLETIONS, {"prompt": [5] * 7}, 7),
        (COMPLETIONS, {"prompt": "x" * 8}, 4),
        (COMPLETIONS, {"prompt": "\u00e4" * 8}, 8),
        (COMPLETIONS, {"prompt": "\ud800" * 8}, 4),
        (COMPLETIONS, {"prompt": [[5] * 7, [5] * 9]}, 9),
        (COMPLETIONS, {"prompt": ["x" * 4, "x" * 8]}, 4),
        (COMPLETIONS, {"prompt": []}, 0),
        (COMPLETIONS, {"prompt": {"a": 1}}, 0),
        (COMPLETIONS, {}, 0),
        (CHAT, {"messages": [{"content": "x" * 8}, {"content": "x" * 2}]}, 5),
        (CHAT, {"messages": [{"content": [{"type": "text", "text": "x" * 8}]}]}, 4),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, float("inf")),
        (CHAT, {"messages": [{"content": None}, 3, {"role": "x"}]}, 0),
        (CHAT, {"messages": "x", "tools": ["123456"]}, 5),
        (MESSAGES, {"messages": [{"content": "x" * 8}], "system": "y" * 4}, 6),
        (MESSAGES, {"messages": [{"content": [{"text": "x" * 8}, {"content": "z" * 8}]}]}, 8),
        (MESSAGES, {"messages": [{"content": [{"content": [{"type": "image"}]}]}]}, float("inf")),
        (MESSAGES, {"messages": [{"type": ["image"]}, 3, None]}, 2.5),
        (RESPONSES, {"input": "x" * 8, "instructions": "y" * 8}, 8),
        (RESPONSES, {"input": [{"output": "x" * 8}], "tools": [{"name": "y" * 4}]}, 6),
        (RESPONSES, {"input": [{"content": [{"type": "input_image"}]}]}, float("inf")),
    ],
)
def test_length_is_that_of_the_longest_prompt(
    path: str, body: dict[str, Any], expected: float
) -> None:
    assert num_tokens(path, body, bytes_per_token=2.0) == expected


def test_probe_is_a_prompt_of_one_token() -> None:
    made = probe("m")
    assert (made.method, made.path) == ("POST", COMPLETIONS)
    assert json.loads(made.body) == {"model": "m", "prompt": [1], "max_tokens": 1}
    assert dict(made.headers)[b"content-length"] == str(len(made.body)).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "text", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
TEXTS = ("prompt", "messages", "input", "system", "tools")
FIELDS = st.sampled_from([*TEXTS, PARAMS, "echo", "logprobs", "n", "stream", "max_tokens"])


@settings(max_examples=200, deadline=None)
@given(
    body=st.dictionaries(FIELDS, JSON),
    path=st.sampled_from([CHAT, COMPLETIONS, MESSAGES, RESPONSES]),
)
def test_whatever_is_sent_the_prompt_stays_and_one_token_is_asked_for(
    body: dict[str, Any], path: str
) -> None:
    forms = split(request(body, path), ALWAYS)
    if forms.prefill is None:
        return
    form, decode = json.loads(forms.prefill.body), json.loads(forms.decode.body)
    assert form["max_output_tokens" if path == RESPONSES else "max_tokens"] == 1
    assert form["stream"] is False
    assert path in (MESSAGES, RESPONSES) or form["n"] == 1
    assert form[PARAMS] == {"raykv_pin_s": 20.0}
    for name in TEXTS:
        assert json.dumps(form.get(name)) == json.dumps(body.get(name))
    assert decode[PARAMS]["raykv_prefilled"] is True
    rest = {name: value for name, value in body.items() if name != PARAMS}
    assert json.dumps({k: v for k, v in decode.items() if k != PARAMS}) == json.dumps(rest)


@pytest.mark.parametrize("depth", [300, 980, 100_000])
def test_request_that_is_nested_deeply_is_left_to_vllm(depth: int) -> None:
    asked = request(b'{"prompt": [1], "tools": ' + b"[" * depth + b"]" * depth + b"}")
    forms = split(asked, ALWAYS)
    assert forms.plain == asked
    assert (forms.prefill is None) == (depth > 300)
