"""A request for disaggregated serving in its two forms: for a prefill engine and for a decode one.

Pure. The prefill form has the same prompt and asks for one token. The decode form is the client's
request, and says that the prompt was computed elsewhere. Neither names an engine or a node: what
one stores under its hash, the other one finds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pydantic import Field

from raykv.serve.arguments import Strict
from raykv.serve.http import exchange
from raykv.vllm.params import PARAMS as SWITCHES
from raykv.vllm.params import PIN, PREFILLED, without_prefilled

PARAMS = "kv_transfer_params"

_OF_THE_ANSWER = (
    "best_of",
    "echo",
    "include",
    "logprobs",
    "min_tokens",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "stop",
    "stop_sequences",
    "stream_options",
    "top_logprobs",
    "use_beam_search",
)
"""What says how the answer looks and nothing about the prompt; some of it is refused together with
one token, or without a stream."""

_ONE_TOKEN: Mapping[str, Mapping[str, Any]] = {
    exchange.COMPLETIONS: {"max_tokens": 1, "n": 1},
    exchange.CHAT: {"max_tokens": 1, "n": 1},
    exchange.MESSAGES: {"max_tokens": 1},
    exchange.RESPONSES: {"max_output_tokens": 1, "background": False, "store": False},
}
"""What asks for one token, by the routes whose prompts are handed over."""

_NEEDS_THE_PROMPT = (
    "previous_response_id",
    "prompt_embeds",
    "prompt_logprobs",
    "truncate_prompt_tokens",
)
"""With one of them vLLM computes the prompt whatever the cache holds, or a prompt that depends on
how long the answer may get, or that begins with what the decode engine alone has."""

_MEDIA = frozenset({"document", "image", "input_audio", "input_file", "input_image"})
"""Types of parts that are no text, in Anthropic's messages and OpenAI's responses."""


class Course(StrEnum):
    """What became of a request's prompt."""

    PREFILLED = "prefilled"
    """A prefill engine has computed it."""
    SHORT = "short"
    """It is too short to be worth the transfer."""
    UNSUITABLE = "unsuitable"
    """It answers no prompt, or can't use the cache."""
    SKIPPED = "skipped"
    """The prefill engines do not answer at present."""
    LOST = "lost"
    """The prefill engine died with it."""
    LATE = "late"
    """The prefill engine did not answer in time."""
    REFUSED = "refused"
    """The prefill engine answered with an error; the decode engine says what is wrong with it."""


class Handover(Strict):
    """When a prompt is computed by a prefill engine.

    Attributes:
        min_prompt_tokens: Shorter prompts are computed where they are decoded.
        bytes_per_token: Of text, whose tokens are not known before an engine has it.
        pin_s: How long chunks that a prefill engine stored are not evicted, so that they are there
            when the decode engine fetches them; 0 leaves them to the pool.
        prefill_deadline_s: For a prefill, with the time that it waits for its turn; then the
            decode engine computes the prompt.
    """

    min_prompt_tokens: int = Field(default=512, ge=0)
    bytes_per_token: float = Field(default=4.0, gt=0)
    pin_s: float = Field(default=30.0, ge=0, le=3600)
    prefill_deadline_s: float = Field(default=60.0, gt=0, le=3600)


@dataclass(frozen=True)
class Split:
    """A request's forms. `prefill` None: the decode engine computes it all, for that `reason`.

    `plain` is what the decode engine gets if the prefill engine has failed.
    """

    plain: exchange.HttpRequest
    decode: exchange.HttpRequest
    prefill: exchange.HttpRequest | None = None
    reason: Course = Course.UNSUITABLE


def split(request: exchange.HttpRequest, handover: Handover) -> Split:
    """Decide where a request's prompt is computed; never raises, whatever a client sends."""
    direct = Split(request, request)
    if request.method != "POST" or request.path not in _ONE_TOKEN:
        return direct
    try:
        body = exchange.parsed(request.body)
        return _split(request, body, handover) if isinstance(body, dict) else direct
    except (ValueError, RecursionError):
        # Including JSON nested too deeply: vLLM explains best what is wrong with it.
        return direct


def _split(request: exchange.HttpRequest, body: dict[str, Any], handover: Handover) -> Split:
    params = body.get(PARAMS)
    if isinstance(params, dict) and PREFILLED in params:
        params = without_prefilled(params)
        body = {**body, PARAMS: params}
        request = _with_body(request, body)
    direct = Split(request, request)
    if not _is_suitable(body, params):
        return direct
    if num_tokens(request.path, body, handover.bytes_per_token) < handover.min_prompt_tokens:
        return replace(direct, reason=Course.SHORT)
    marked = {**(params or {}), PREFILLED: True}
    return Split(
        plain=request,
        decode=_with_body(request, {**body, PARAMS: marked}),
        prefill=_with_body(request, prefill_form(request.path, body, handover.pin_s)),
        reason=Course.PREFILLED,
    )


def _is_suitable(body: Mapping[str, Any], params: Any) -> bool:
    """Whether the decode engine would load what a prefill engine has stored."""
    if any(body.get(name) is not None for name in _NEEDS_THE_PROMPT):
        return False
    if body.get("truncation") == "auto":
        return False
    if body.get("echo") and body.get("logprobs") is not None:
        return False
    if not isinstance(params, dict):
        return params is None
    return not any(params.get(name) is False for name in SWITCHES)


def prefill_form(path: str, body: Mapping[str, Any], pin_s: float) -> dict[str, Any]:
    """The body for a prefill engine. All that the prompt and its hashes are made of stays."""
    form = {name: value for name, value in body.items() if name not in _OF_THE_ANSWER}
    form |= {**_ONE_TOKEN[path], "stream": False}
    if "max_completion_tokens" in form:
        form["max_completion_tokens"] = 1
    form[PARAMS] = {PIN: pin_s} if pin_s > 0 else {}
    return form


def num_tokens(path: str, body: Mapping[str, Any], bytes_per_token: float) -> float:
    """About how many tokens a request's longest prompt has.

    Token ids count exactly, text by its bytes. An image or the like counts as endless: whatever it
    is, it takes an engine long.
    """
    if path == exchange.CHAT:
        messages = body.get("messages")
        said = messages if isinstance(messages, list) else []
        num_bytes = sum(_bytes_in(each.get("content")) for each in said if isinstance(each, dict))
        tools = body.get("tools")
        num_bytes += len(json.dumps(tools)) if tools else 0
        return num_bytes / bytes_per_token
    if path in (exchange.MESSAGES, exchange.RESPONSES):
        names = ("system", "instructions", "tools", "messages", "input")
        return sum(_bytes_of_all(body.get(name)) for name in names) / bytes_per_token
    prompt = body.get("prompt")
    prompts = [prompt] if isinstance(prompt, str) or _are_ids(prompt) else prompt
    if not isinstance(prompts, list):
        return 0.0
    return max((_length(each, bytes_per_token) for each in prompts), default=0.0)


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int)


def _length(prompt: Any, bytes_per_token: float) -> float:
    if isinstance(prompt, str):
        return _size(prompt) / bytes_per_token
    return float(len(prompt)) if isinstance(prompt, list) else 0.0


def _bytes_in(content: Any) -> float:
    """Bytes of a message's content: text, or a list of parts."""
    if isinstance(content, str):
        return _size(content)
    if not isinstance(content, list):
        return 0.0
    return sum(_bytes_of_part(part) for part in content)


def _bytes_of_part(part: Any) -> float:
    if not isinstance(part, dict):
        return 0.0
    text = part.get("text")
    return _size(text) if isinstance(text, str) else float("inf")


def _bytes_of_all(said: Any) -> float:
    """Bytes of all texts in messages of agents and their tools, however they are put together."""
    if isinstance(said, str):
        return _size(said)
    if isinstance(said, dict):
        kind = said.get("type")
        is_text = not isinstance(kind, str) or kind not in _MEDIA
        return sum(map(_bytes_of_all, said.values())) if is_text else float("inf")
    return sum(map(_bytes_of_all, said)) if isinstance(said, list) else 0.0


def _size(text: str) -> float:
    return float(len(text.encode(errors="replace")))


def _with_body(request: exchange.HttpRequest, body: Mapping[str, Any]) -> exchange.HttpRequest:
    raw = json.dumps(body).encode()
    return replace(request, body=raw, headers=_sized(request.headers, len(raw)))


def _sized(headers: exchange.Headers, num_bytes: int) -> exchange.Headers:
    """The headers with another length of the body."""
    kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
    return [*kept, (b"content-length", str(num_bytes).encode())]


def probe(model: str) -> exchange.HttpRequest:
    """A prompt of one token, to see whether an engine answers."""
    body = json.dumps({"model": model, "prompt": [1], "max_tokens": 1}).encode()
    headers = _sized([(b"content-type", b"application/json")], len(body))
    return exchange.HttpRequest("POST", exchange.COMPLETIONS, b"", headers, body)
