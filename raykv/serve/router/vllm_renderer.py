"""vLLM's own renderer without an engine: a request's prompts exactly as a replica would make them.

It loads vLLM into the process, and no weights. Source: vLLM 0.32, `entrypoints/launchers/render`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raykv.base.errors import SettingError
from raykv.prompts.adapters import named
from raykv.prompts.block_hashes import PromptTraits
from raykv.prompts.prompt_keys import PromptTokens
from raykv.serve.http.exchange import CHAT, MESSAGES, RESPONSES, parsed
from raykv.serve.vllm_app import parse_flags

MOST_PROMPTS = 8
"""In one request."""

_TEXTS = frozenset(
    {
        "function_call",
        "function_call_output",
        "input_text",
        "message",
        "output_text",
        "reasoning",
        "reasoning_text",
        "redacted_thinking",
        "text",
        "thinking",
        "tool_result",
        "tool_use",
    }
)
"""Types of messages and of their parts that have no more than text."""


class VLLMRenderer:
    """Prompts for engines that were started with `flags` of `vllm serve`, model first.

    All calls, the constructor included, are of one thread, which has no event loop.

    Raises:
        SettingError: vLLM refuses the flags.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        args = parse_flags(flags)
        self._runner = asyncio.Runner()
        self._state = self._runner.run(_state_of(args))
        served = args.served_model_name or [args.model]
        self._served = served[0]
        adapters = args.lora_modules or []
        self._traits: dict[str | None, PromptTraits] = dict.fromkeys(
            [None, *served], PromptTraits()
        )
        for adapter in adapters:
            self._traits[adapter.name] = PromptTraits("", adapter.name, adapter.path)

    def __call__(self, path: str, body: bytes) -> list[PromptTokens] | None:
        """The prompts of a request; None if text and tokens alone don't determine them.

        Raises:
            Exception: vLLM's, for a request that it refuses.
        """
        given = parsed(body)
        if not isinstance(given, Mapping) or not _is_plain(given):
            return None
        traits = self._traits.get(given.get("model"))
        if traits is None:
            return None
        try:
            traits = named(traits)
        except SettingError:
            return None
        inputs = self._runner.run(self._inputs(path, given))
        if not isinstance(inputs, list) or not 0 < len(inputs) <= MOST_PROMPTS:
            return None
        if any(each.get("type") != "token" for each in inputs):
            return None
        return [
            PromptTokens(
                each["prompt_token_ids"], replace(traits, cache_salt=each.get("cache_salt") or "")
            )
            for each in inputs
        ]

    def close(self) -> None:
        """Give back what belongs to its thread; it renders no more."""
        self._runner.close()

    async def _inputs(self, path: str, given: Mapping[str, Any]) -> Any:
        """What the engine would be given, or what vLLM answers instead."""
        renderer = self._state.online_renderer
        if path in (MESSAGES, RESPONSES):
            made = await self._of_agent(path, {**given, "model": self._served})
            tokens = getattr(made, "token_ids", None)
            return tokens and [
                {"type": "token", "prompt_token_ids": tokens, "cache_salt": made.cache_salt}
            ]
        if path == CHAT:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            chat = ChatCompletionRequest.model_validate(given)
            rendered = await renderer.render_chat(chat)
            return rendered[1] if isinstance(rendered, tuple) else rendered
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return await renderer.render_completion(CompletionRequest.model_validate(given))

    async def _of_agent(self, path: str, given: Mapping[str, Any]) -> Any:
        """The request that vLLM's engines would be sent, or an error."""
        render = self._state.serving_render
        if path == MESSAGES:
            from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

            request = AnthropicMessagesRequest.model_validate(given)
            return await render.render_messages_request(request)
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        return await render.render_responses_request(ResponsesRequest.model_validate(given))


async def _state_of(args: Any) -> Any:
    """What vLLM's server without engines has."""
    from starlette.datastructures import State
    from vllm import AsyncEngineArgs
    from vllm.config import VllmConfig
    from vllm.entrypoints.launchers.render.app_state import init_render_app_state

    engine_args = AsyncEngineArgs.from_cli_args(args)
    model_config = engine_args.create_model_config()
    # Nothing is computed here: what the weights need is not checked.
    model_config.quantization = None
    config = VllmConfig(
        model_config=model_config,
        structured_outputs_config=engine_args.create_structured_outputs_config(),
    )
    state = State()
    await init_render_app_state(config, state, args)
    return state


def _is_plain(given: Mapping[str, Any]) -> bool:
    """Whether a request is text or tokens, with nothing to fetch and no template of its own."""
    if given.get("prompt_embeds") is not None or given.get("chat_template") is not None:
        return False
    template_kwargs = given.get("chat_template_kwargs")
    if isinstance(template_kwargs, Mapping) and "chat_template" in template_kwargs:
        return False
    prompts = given.get("prompt")
    if isinstance(prompts, list) and _num_prompts(prompts) > MOST_PROMPTS:
        return False
    return all(_is_text(given.get(name)) for name in ("messages", "system", "input"))


def _num_prompts(prompts: Sequence[Any]) -> int:
    return len(prompts) if prompts and isinstance(prompts[0], str | list) else 1


def _is_text(said: Any) -> bool:
    """Whether messages or their parts have no content but text, as far as they are lists."""
    if not isinstance(said, list):
        return True
    return all(
        isinstance(part, Mapping)
        and part.get("type", "message" if "role" in part else None) in _TEXTS
        and _is_text(part.get("content"))
        and _is_text(part.get("output"))
        for part in said
    )
