"""vLLM's own renderer without an engine: a request's prompts exactly as a replica would make them.

It loads vLLM into the process, and no weights. Source: vLLM 0.32, `entrypoints/launchers/render`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from raykv.prompts.adapters import AdapterFiles
from raykv.prompts.block_hashes import PromptTraits
from raykv.prompts.prompt_keys import PromptTokens
from raykv.serve.http.exchange import parsed
from raykv.serve.vllm_app import parse_flags

MOST_PROMPTS = 8
"""In one request."""


class VLLMRenderer:
    """Prompts for engines that were started with `flags` of `vllm serve`, model first.

    All calls, the constructor included, are of one thread, which has no event loop.

    Raises:
        SettingError: vLLM refuses the flags.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        args = parse_flags(flags)
        self._runner = asyncio.Runner()
        self._renderer = self._runner.run(_renderer_of(args))
        served = args.served_model_name or [args.model]
        adapters = args.lora_modules or []
        self._traits: dict[str | None, PromptTraits] = dict.fromkeys(
            [None, *served], PromptTraits()
        )
        for adapter in adapters:
            self._traits[adapter.name] = PromptTraits("", adapter.name, adapter.path)
        self._files = AdapterFiles()

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
        if traits.lora_name:
            digest = self._files.content(traits.lora_path).digest
            if not digest:
                return None
            traits = replace(traits, lora_digest=digest)
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
        if path.endswith("/chat/completions"):
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

            chat = ChatCompletionRequest.model_validate(given)
            rendered = await self._renderer.render_chat(chat)
            return rendered[1] if isinstance(rendered, tuple) else rendered
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        return await self._renderer.render_completion(CompletionRequest.model_validate(given))


async def _renderer_of(args: Any) -> Any:
    """vLLM's renderer, as its server without engines has it."""
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
    return state.online_renderer


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
    messages = given.get("messages")
    if messages is None:
        return True
    return isinstance(messages, list) and all(map(_is_text, messages))


def _num_prompts(prompts: Sequence[Any]) -> int:
    return len(prompts) if prompts and isinstance(prompts[0], str | list) else 1


def _is_text(message: Any) -> bool:
    """Whether a message has no content but text."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return isinstance(message, Mapping)
    return all(isinstance(part, Mapping) and part.get("type") == "text" for part in content)
