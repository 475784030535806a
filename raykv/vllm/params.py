"""What clients may say: `kv_transfer_params` of a request, of which two keys have an effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raykv.core.requests import RequestOptions

logger = logging.getLogger("raykv")

PARAMS = ("raykv_load", "raykv_store")
"""What is documented: truth values that say what the request may do; both are true."""


def documented(params: Any) -> dict[str, bool] | None:
    """The part of `kv_transfer_params` that has an effect; whatever a client sends, no error.

    vLLM's offloading connector knows keys of its own (`max_load_tokens`, `max_offload_tokens`,
    `kv_load_tiers`), which are no part of RayKV's interface.
    """
    if not isinstance(params, dict):
        return None
    kept: dict[str, bool] = {}
    for name in PARAMS:
        value = params.get(name, True)
        if isinstance(value, bool):
            kept[name] = value
        else:
            # A client's mistake must not fail its request, nor what it sends fill the log.
            kind = type(value).__name__
            logger.debug("kv_transfer_params: %s is a %s, not a bool; ignored", name, kind)
    return kept


def request_options(params: Any) -> RequestOptions:
    """What a request's `kv_transfer_params` allow."""
    known = documented(params) or {}
    return RequestOptions(known.get("raykv_load", True), known.get("raykv_store", True))


@contextmanager
def only_documented(request: Any) -> Iterator[None]:
    """Have vLLM's offloading scheduler see what is documented, and nothing else.

    Afterwards the request has its parameters again, for other connectors that it may go through,
    unless they are none at all: vLLM's scheduler would stop at them.
    """
    sent = request.kv_transfer_params
    request.kv_transfer_params = documented(sent)
    try:
        yield
    finally:
        request.kv_transfer_params = sent if isinstance(sent, dict) else None
