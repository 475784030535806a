"""What clients may ask for: twelve keys of a request's `kv_transfer_params` have an effect.

vLLM's own `kv_hints`, which orchestrators may attach to a request, carry the wishes among them too:
in the payload of an action of the type `raykv.hints`, under the same names.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from raykv.base.parsing import shown
from raykv.base.tenants import salt_label, server_label
from raykv.engine.hints import Allowed, Hint
from raykv.engine.requests import RequestOptions
from raykv.protocol import columns, engine, operator, sessions
from raykv.vllm.identity.media import NAMED_BY_CLIENT

logger = logging.getLogger("raykv")

PARAMS = ("raykv_load", "raykv_store")
"""Truth values for what the request may do; both default to true."""

PREFILLED = "raykv_prefilled"
"""True: another engine has just computed the prompt, see `RequestOptions`. The router of prefill
and decode engines sets it; from a client it can cost that client's own request a wait or a fetch.
"""

PIN = "raykv_pin_s"
PRIORITY = "raykv_priority"
SESSION = "raykv_session"
OVER = "raykv_session_over"
PAUSE = "raykv_pause_s"
HINTS = (PIN, PRIORITY, SESSION, OVER, PAUSE)
"""Wishes, where the setting `client_hints` allows them. For the chunks of the prompt, a number of
seconds above 0, and a whole number from 1 to 9. Then the name of the request's session, true if it
is over with this request, and the seconds after which it is to go on if it pauses."""

MOST_LOADED, MOST_STORED = "max_load_tokens", "max_offload_tokens"
"""vLLM's own: the most tokens. vLLM's offloading scheduler sees to the first one."""

OUR_MOST_STORED = "raykv_max_offload_tokens"
"""The second one as it reaches our manager: vLLM's offloading scheduler asserts that it is not
below the end of what it stores of recurrent states.
"""

TIERS = "kv_load_tiers"
"""vLLM's own: what may be fetched for the request, a list of mappings with a medium, a locality or
both, of which vLLM makes a filter. What the own node's pool has is loaded all the same."""

TIER_WORDS = {"medium": ("CPU", "STORAGE"), "locality": ("LOCAL", "REMOTE")}
MAX_TIERS = 8

ACTION, ACTION_VERSION = "raykv.hints", "1"
"""The type of action of vLLM's `kv_hints` that has wishes, and its version up to a dot."""

MAX_ACTIONS = 16
"""Actions of one request that are looked at."""

Known = bool | float | str

TENANT = "raykv_tenant"
"""A text that says whose the request is, where the setting `tenant_source` says that the server
sets it. No part of what vLLM's offloading scheduler sees."""


KEYS = (*PARAMS, PREFILLED, *HINTS, OUR_MOST_STORED, TENANT)


def _is_seconds(value: Any) -> bool:
    """A truth value is not a number here."""
    return type(value) in (int, float) and 0 < value <= operator.MAX_PIN_S


def _is_name(value: Any) -> bool:
    if not isinstance(value, str):
        return False
    return 0 < len(value) <= sessions.MAX_SESSION_NAME and value.isprintable()


VALID: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(PARAMS, lambda value: isinstance(value, bool)),
    **dict.fromkeys((PREFILLED, OVER), lambda value: value is True),
    **dict.fromkeys(
        (MOST_LOADED, OUR_MOST_STORED), lambda value: type(value) is int and value >= 0
    ),
    **dict.fromkeys((PIN, PAUSE), _is_seconds),
    PRIORITY: lambda value: type(value) is int and 1 <= value <= columns.MAX_PRIORITY,
    SESSION: _is_name,
}
"""Which values have an effect, by key."""


def documented(params: Any) -> dict[str, Any] | None:
    """The part of `kv_transfer_params` that has an effect; whatever a client sends, no error."""
    if not isinstance(params, dict):
        return None
    kept: dict[str, Any] = _valid({OUR_MOST_STORED: params.get(MOST_STORED), **params}, VALID)
    if (tiers := _tiers(params.get(TIERS))) is not None:
        kept[TIERS] = tiers
    return kept


def _tiers(said: Any) -> list[dict[str, str]] | None:
    """The valid entries; None, so that all is allowed, if there are entries and none is valid."""
    if not isinstance(said, list):
        return None
    kept = []
    for entry in said[:MAX_TIERS]:
        words = {name: entry.get(name) for name in TIER_WORDS} if isinstance(entry, dict) else {}
        named = {name: str(word).upper() for name, word in words.items() if word is not None}
        if words and all(word in TIER_WORDS[name] for name, word in named.items()):
            kept.append(named)
    return kept if kept or not said else None


def _valid(said: Mapping[str, Any], names: Iterable[str]) -> dict[str, Known]:
    """Those of the names with a valid value; wishes for a session need its name."""
    kept = {name: said[name] for name in names if name in said and VALID[name](said[name])}
    without = () if SESSION in kept else (OVER, PAUSE)
    return {name: value for name, value in kept.items() if name not in without}


def ignored(params: Any, kv_hints: Any, allowed: Allowed, *, by_server: bool) -> dict[str, str]:
    """Keys of ours in a request that have no effect, and why; whatever a client sends, no error.

    Args:
        params: its `kv_transfer_params`.
        kv_hints: vLLM's.
        allowed: the setting `client_hints`.
        by_server: whether the setting `tenant_source` is `server`.
    """
    given = params if isinstance(params, dict) else {}
    found: dict[str, str] = {}
    for said in (given, *_payloads(kv_hints)):
        valid = documented(said) or {}
        names = [name for name in said if isinstance(name, str) and name.startswith("raykv_")]
        for name in names[: engine.MAX_IGNORED]:
            is_no = name not in PARAMS and said[name] in (None, False)
            is_valid = is_no or name == TENANT or name in valid
            if why := _why_ignored(name, allowed, by_server=by_server, is_valid=is_valid):
                found[shown(name)[1:-1][: sessions.MAX_SESSION_NAME]] = why
    return dict([*found.items()][: engine.MAX_IGNORED])


def _why_ignored(name: str, allowed: Allowed, *, by_server: bool, is_valid: bool) -> str:
    """Why a key has no effect; empty if it has one."""
    if name not in KEYS:
        close = difflib.get_close_matches(name[: sessions.MAX_SESSION_NAME], KEYS, n=1)
        return "there is no such key" + (f": did you mean {close[0]}?" if close else "")
    if name == TENANT and not by_server:
        return "only with tenant_source=server it says whose a request is"
    if name in HINTS and not may_wish(name, allowed):
        return f"client_hints={allowed} does not allow it"
    if is_valid:
        return ""
    needs = f", or {SESSION} is missing" if name in (OVER, PAUSE) else ""
    return f"its value is not allowed{needs}"


def may_wish(name: str, allowed: Allowed) -> bool:
    """Whether the setting `client_hints` lets clients use one of `HINTS`."""
    least = {PRIORITY: Allowed.PRIORITY, PIN: Allowed.PIN}.get(name, Allowed.SESSION)
    return [*Allowed].index(allowed) >= [*Allowed].index(least)


def without_prefilled(params: dict[str, Any]) -> dict[str, Any]:
    """The `params` of a client: only the router that had the prompt prefilled may say so."""
    return {name: value for name, value in params.items() if name != PREFILLED}


def hinted(kv_hints: Any) -> dict[str, Known]:
    """The wishes in vLLM's `kv_hints`, a `KvHintsEnvelope`; whatever is in there, no error."""
    kept: dict[str, Known] = {}
    for payload in _payloads(kv_hints):
        kept |= _valid(payload, HINTS)
    return kept


def _payloads(kv_hints: Any) -> Iterator[dict[str, Any]]:
    """What the actions that are for us carry; those of other types are for others."""
    actions = getattr(kv_hints, "actions", None)
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        version = str(getattr(action, "action_version", "")).partition(".")[0]
        payload = getattr(action, "payload", None)
        if getattr(action, "action_type", "") != ACTION or not isinstance(payload, dict):
            continue
        if version == ACTION_VERSION:
            yield payload
        else:
            logger.debug("kv_hints: %s of version %r; ignored", ACTION, version)


def request_options(params: Any) -> RequestOptions:
    """What a request's `kv_transfer_params` allow."""
    known = documented(params) or {}
    most = known.get(OUR_MOST_STORED)
    return RequestOptions(
        load=bool(known.get("raykv_load", True)),
        store=bool(known.get("raykv_store", True)),
        prefilled=PREFILLED in known,
        most_stored=None if most is None else int(most),
    )


def tenant_of(request: Any, *, by_server: bool) -> str:
    """The label of whose a request of vLLM's is, `by_server` if that sets it; empty: nobody's in
    particular.
    """
    params = request.kv_transfer_params
    if by_server and isinstance(params, dict) and (label := server_label(params.get(TENANT))):
        return label
    salt = request.cache_salt or ""
    if salt.startswith(NAMED_BY_CLIENT):
        salt = salt[len(NAMED_BY_CLIENT) + 1 :]
    return salt_label(salt)


def hint_of(params: Any, kv_hints: Any = None) -> Hint:
    """What a request's `kv_transfer_params` and vLLM's `kv_hints` wish for, allowed or not.

    Where both say something, `kv_hints` counts: an orchestrator has attached them.
    """
    known = (documented(params) or {}) | hinted(kv_hints)
    pin_s, priority, pause_s = known.get(PIN), known.get(PRIORITY), known.get(PAUSE)
    return Hint(
        pin_s=None if pin_s is None else float(pin_s),
        priority=None if priority is None else int(priority),
        session=str(known.get(SESSION, "")),
        is_over=OVER in known,
        pause_s=None if pause_s is None else float(pause_s),
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
