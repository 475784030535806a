"""Why a request was given to Ray's power-of-two choice instead of being placed."""

from __future__ import annotations

from enum import Enum


class Fallback(Enum):
    """The value is what the metric `raykv_routed_requests` calls it."""

    NO_PROMPT = "no prompt"
    """Neither a completion nor a chat."""

    NOT_LOADED = "tokenizer not loaded yet"
    NOT_UNDERSTOOD = "not understood"
    """Images and other media, embeddings, a template of its own, too many prompts or too long ones,
    a model that is not served, or what vLLM will refuse."""

    BUSY = "tokenizer busy"
    NO_NAMESPACE = "namespace not known"
    NO_ANSWER = "directory did not answer"
