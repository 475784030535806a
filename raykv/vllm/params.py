"""What clients may ask for: five keys of a request's `kv_transfer_params` have an effect."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raykv.engine.hints import Hint
from raykv.engine.requests import RequestOptions
from raykv.protocol.operator import MAX_PIN_S, MAX_PRIORITY

logger = logging.getLogger("raykv")

PARAMS = ("raykv_load", "raykv_store")
"""Truth values for what the request may do; both default to true."""

PREFILLED = "raykv_prefilled"
"""True: another engine has just computed the prompt, see `RequestOptions`. The router of prefill
and decode engines sets it; from a client it can cost that client's own request a wait or a fetch.
"""

PIN = "raykv_pin_s"
HINTS = (PIN, "raykv_priority")
"""Wishes for the chunks of the prompt, where the setting `client_hints` allows them: a number of
seconds above 0, and a whole number from 1 to 9."""


def documented(params: Any) -> dict[str, bool | float] | None:
    """The part of `kv_transfer_params` that has an effect; whatever a client sends, no error.

    vLLM's offloading connector knows keys of its own (`max_load_tokens`, `max_offload_tokens`,
    `kv_load_tiers`), which are no part of RayKV's interface.
    """
    if not isinstance(params, dict):
        return None
    kept: dict[str, bool | float] = {}
    for name in PARAMS:
        value = params.get(name, True)
        if isinstance(value, bool):
            kept[name] = value
        else:
            # A client's mistake must neither fail its request nor fill the log.
            kind = type(value).__name__
            logger.debug("kv_transfer_params: %s is a %s, not a bool; ignored", name, kind)
    if params.get(PREFILLED) is True:
        kept[PREFILLED] = True
    for name in HINTS:
        value = params.get(name)
        if value is None:
            continue
        if _is_hint(name, value):
            kept[name] = value
        else:
            logger.debug("kv_transfer_params: %s is not a number in its range; ignored", name)
    return kept


def without_prefilled(params: dict[str, Any]) -> dict[str, Any]:
    """The `params` of a client: only the router that had the prompt prefilled may say so."""
    return {name: value for name, value in params.items() if name != PREFILLED}


def _is_hint(name: str, value: Any) -> bool:
    """Whether a client's wish is valid; a truth value is not a number here."""
    if type(value) is int and name == "raykv_priority":
        return 1 <= value <= MAX_PRIORITY
    is_number = type(value) in (int, float) and name == PIN
    return is_number and 0 < value <= MAX_PIN_S


def request_options(params: Any) -> RequestOptions:
    """What a request's `kv_transfer_params` allow."""
    known = documented(params) or {}
    return RequestOptions(
        load=bool(known.get("raykv_load", True)),
        store=bool(known.get("raykv_store", True)),
        prefilled=PREFILLED in known,
    )


def hint_of(params: Any) -> Hint:
    """What a request's `kv_transfer_params` wish for, allowed or not."""
    known = documented(params) or {}
    pin_s, priority = known.get(PIN), known.get("raykv_priority")
    return Hint(
        pin_s=None if pin_s is None else float(pin_s),
        priority=None if priority is None else int(priority),
    )


@contextmanager
def only_documented(request: Any) -> Iterator[None]:
    """Let vLLM's offloading scheduler see only what is documented.

    Afterwards the request has its parameters again, for other connectors that it may go through,
    unless they are invalid: vLLM's scheduler would fail on them.
    """
    sent = request.kv_transfer_params
    request.kv_transfer_params = documented(sent)
    try:
        yield
    finally:
        request.kv_transfer_params = sent if isinstance(sent, dict) else None
