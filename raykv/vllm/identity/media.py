"""Images and sound in a request: named by their content, or by the client.

vLLM hashes media into the blocks of a prompt by a digest of their content, or by a uuid that the
client gives instead: two users who give the same one would get each other's KV, and vLLM's own
caches of media mix them whatever their salts. Once hashed the two look alike, so they are
distinguished where prompts are rendered, in the API server's process: a prompt with a client's
names, or with media that were rendered elsewhere, gets a salt that says so, and EngineCore refuses
it. Where vLLM cannot be watched, all requests with media are refused. Source: vLLM 0.32.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any

from raykv.vllm.internals.engine import around, configuration_of, wrap_prompts

logger = logging.getLogger("raykv")

NAMED_BY_CLIENT = "raykv: media named by a client"
"""Beginning of the salt of prompts that must neither load nor store; the client's own follows."""

_SEEN = "_raykv_seen"
"""Key of a rendered prompt whose media went through our hands."""

_DIGEST = re.compile(r"[0-9a-f]{64}|[0-9a-f]{128}")
"""Lengths of digests of all algorithms that vLLM knows; without digests it numbers the media."""

# Whether this process is watched, as all processes of an engine are.
_is_watching = False


def watch_prompts() -> None:
    """Have prompts with a client's names marked, in engines with RayKV; again changes nothing.

    Raises:
        AttributeError, ImportError: this vLLM renders prompts in another way; nothing is changed.
    """
    global _is_watching
    wrap_prompts(_marking, _marking_async, _checking)
    _is_watching = True


def may_share_media(request: Any) -> bool:
    """Whether all media of a request, if any, are named by their content."""
    media = getattr(request, "mm_features", None)
    if not media:
        return True
    if not _is_watching:
        _warn()
        return False
    if (request.cache_salt or "").startswith(NAMED_BY_CLIENT):
        return False
    return all(_DIGEST.fullmatch(str(getattr(each, "mm_hash", None))) for each in media)


@functools.cache
def _warn() -> None:
    logger.warning(
        "requests with images or sound neither load nor store: this vLLM renders prompts in a way "
        "that RayKV doesn't know, or did not load RayKV's plugin (see VLLM_PLUGINS)"
    )


def is_ours(vllm_config: Any) -> bool:
    """Whether an engine's KV goes through one of our connectors, alone or among others."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return transfer is not None and "RayKV" in f"{transfer.kv_connector} " + str(
        (transfer.kv_connector_extra_config or {}).get("connectors", "")
    )


def _may_be_ours(owner: Any) -> bool:
    """Of what renders or processes prompts; where vLLM does not say whose it is, it counts."""
    vllm_config = configuration_of(owner)
    return vllm_config is None or is_ours(vllm_config)


def _with_salt(prompt: Any) -> Any:
    # The client's own salt stays in it: vLLM's cache keeps its users apart.
    return {**prompt, "cache_salt": f"{NAMED_BY_CLIENT} {prompt.get('cache_salt') or ''}"}


def _has_names(uuids: Mapping[str, Any]) -> bool:
    lists = (each if isinstance(each, list | tuple) else [each] for each in uuids.values())
    return any(uuid is not None for each in lists for uuid in each)


def _renamed(uuid: Any) -> Any:
    """The uuid, or one that is no digest: vLLM's caches would take its media for that content."""
    if isinstance(uuid, list | tuple):
        return [_renamed(each) for each in uuid]
    return f"client-{uuid}" if isinstance(uuid, str) and _DIGEST.fullmatch(uuid) else uuid


def _marked(renderer: Any, prompt: Any) -> Any:
    uuids = prompt.get("multi_modal_uuids")
    if not uuids or not _may_be_ours(renderer) or not _has_names(uuids):
        return prompt
    renamed = {modality: _renamed(each) for modality, each in uuids.items()}
    return {**_with_salt(prompt), "multi_modal_uuids": renamed}


def _seen(rendered: Any) -> Any:
    if rendered.get("type") == "multimodal":
        rendered[_SEEN] = True
    return rendered


@around
def _marking(process: Any, renderer: Any, prompt: Any, *args: Any, **more: Any) -> Any:
    return _seen(process(renderer, _marked(renderer, prompt), *args, **more))


def _marking_async(process: Any) -> Any:
    @functools.wraps(process)
    async def call(renderer: Any, prompt: Any, *args: Any, **more: Any) -> Any:
        return _seen(await process(renderer, _marked(renderer, prompt), *args, **more))

    return call


@around
def _checking(
    process: Any, processor: Any, request_id: str, prompt: Any, *args: Any, **more: Any
) -> Any:
    has_media = isinstance(prompt, dict) and prompt.get("type") == "multimodal"
    if has_media and not prompt.get(_SEEN) and _may_be_ours(processor):
        prompt = _with_salt(prompt)
    return process(processor, request_id, prompt, *args, **more)
