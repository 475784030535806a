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


def test_prefill_form_asks_for_one_token_of_the_same_prompt() -> None:
    prompt = {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "cache_salt": "mine",
        "chat_template_kwargs": {"thinking": True},
        "response_format": {"type": "text"},
        "priority": 3,
    }
    answer = {
        "max_completion_tokens": 900,
        "max_tokens": 900,
        "min_tokens": 5,
        "n": 4,
        "logprobs": True,
        "top_logprobs": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "use_beam_search": False,
        "stop": ["."],
    }
    forms = split(request({**prompt, **answer}, CHAT), ALWAYS)
    assert parsed(forms.prefill) == {
        **prompt,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        PARAMS: {"raykv_pin_s": 20.0},
    }
    assert parsed(forms.decode) == {**prompt, **answer, PARAMS: {"raykv_prefilled": True}}
    assert forms.plain == request({**prompt, **answer}, CHAT)
    assert forms.reason is Course.PREFILLED


@pytest.mark.parametrize(
    ("path", "prompt", "answer", "one"),
    [
        (
            MESSAGES,
            {
                "system": "s",
                "messages": [{"role": "user", "content": "hello"}],
                "tools": [{"name": "f", "input_schema": {}}],
                "thinking": {"type": "enabled", "budget_tokens": 1024},
            },
            {"max_tokens": 900, "stop_sequences": ["."], "stream": True},
            {"max_tokens": 1},
        ),
        (
            RESPONSES,
            {
                "instructions": "s",
                "input": [{"role": "user", "content": "hello"}],
                "tools": [{"type": "function", "name": "f"}],
                "reasoning": {"effort": "low"},
            },
            {
                "background": True,
                "include": ["message.output_text.logprobs"],
                "max_output_tokens": 900,
                "store": True,
                "stream": True,
                "top_logprobs": 3,
            },
            {"max_output_tokens": 1, "background": False, "store": False},
        ),
    ],
)
def test_prompts_of_agents_are_handed_over_too(
    path: str, prompt: dict[str, Any], answer: dict[str, Any], one: dict[str, Any]
) -> None:
    forms = split(request({"model": "m", **prompt, **answer}, path), ALWAYS)
    expected = {"model": "m", **prompt, **one, "stream": False, PARAMS: {"raykv_pin_s": 20.0}}
    assert parsed(forms.prefill) == expected
    assert parsed(forms.decode) == {
        "model": "m",
        **prompt,
        **answer,
        PARAMS: {"raykv_prefilled": True},
    }


@pytest.mark.parametrize("extra", [{"previous_response_id": "resp_1"}, {"truncation": "auto"}])
def test_response_whose_prompt_the_decode_engine_alone_knows_is_left_to_it(
    extra: dict[str, Any],
) -> None:
    forms = split(request({"input": "x", **extra}, RESPONSES), ALWAYS)
    assert (forms.prefill, forms.reason) == (None, Course.UNSUITABLE)


def test_clients_wishes_reach_the_decode_engine_only() -> None:
    sent = {"raykv_pin_s": 9.0, "raykv_load": True, "do_remote_prefill": True, "remote_host": "h"}
    forms = split(request({"prompt": [1, 2], PARAMS: sent}), ALWAYS)
    assert parsed(forms.prefill)[PARAMS] == {"raykv_pin_s": 20.0}
    assert parsed(forms.decode)[PARAMS] == {**sent, "raykv_prefilled": True}


@pytest.mark.parametrize("min_prompt_tokens", [0, 100])
def test_client_cannot_say_that_its_prompt_was_prefilled(min_prompt_tokens: int) -> None:
    sent = {"raykv_prefilled": True, "raykv_load": True}
    body = {"prompt": [1, 2], PARAMS: sent}
    forms = split(request(body), Handover(min_prompt_tokens=min_prompt_tokens))
    assert parsed(forms.plain) == {"prompt": [1, 2], PARAMS: {"raykv_load": True}}
    if min_prompt_tokens:
        assert (forms.prefill, forms.decode) == (None, forms.plain)


def test_without_a_pin_nothing_is_wished_for() -> None:
    forms = split(request({"prompt": [1, 2]}), Handover(min_prompt_tokens=0, pin_s=0))
    assert parsed(forms.prefill)[PARAMS] == {}


@pytest.mark.parametrize(
    "extra",
    [
        {"prompt_logprobs": 0},
        {"prompt_embeds": "AAAA"},
        {"truncate_prompt_tokens": 10},
        {"echo": True, "logprobs": 1},
        {PARAMS: {"raykv_load": False}},
        {PARAMS: {"raykv_store": False}},
        {PARAMS: [1]},
    ],
)
def test_request_that_cannot_use_the_cache_is_left_to_the_decode_engine(
    extra: dict[str, Any],
) -> None:
    made = request({"prompt": [1, 2], **extra})
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


@pytest.mark.parametrize(("length", "reason"), [(9, Course.SHORT), (10, Course.PREFILLED)])
def test_short_prompt_is_not_handed_over(length: int, reason: Course) -> None:
    forms = split(request({"prompt": [1] * length}), Handover(min_prompt_tokens=10))
    assert forms.reason is reason
    assert (forms.prefill is None) == (reason is Course.SHORT)


def test_probe_is_a_prompt_of_one_token() -> None:
    made = probe("m")
    assert (made.method, made.path) == ("POST", COMPLETIONS)
    assert json.loads(made.body) == {"model": "m", "prompt": [1], "max_tokens": 1}
    assert dict(made.headers)[b"content-length"] == str(len(made.body)).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["content", "text"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("prompt", "messages", "input", "system", "tools", PARAMS),
        *("echo", "logprobs", "n", "stream", "max_tokens"),
    ]
)


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
    for name in ("prompt", "messages", "input", "system", "tools"):
        assert json.dumps(form.get(name)) == json.dumps(body.get(name))
    assert decode[PARAMS]["raykv_prefilled"] is True
    rest = {name: value for name, value in body.items() if name != PARAMS}
    assert json.dumps({k: v for k, v in decode.items() if k != PARAMS}) == json.dumps(rest)


@pytest.mark.parametrize("depth", [300, 980, 100_000])
def test_request_that_is_nested_deeply_is_left_to_vllm(depth: int) -> None:
    asked = request(b'{"prompt": [1], "tools": ' + b"[" * depth + b"]" * depth + b"}")
    forms = split(asked, ALWAYS)
    assert forms.plain == asked
    assert forms.prefill is None or depth == 300
