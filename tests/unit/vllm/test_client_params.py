"""What a client may say in `kv_transfer_params`: nine keys. Nothing else has any effect."""

from __future__ import annotations

from itertools import product, starmap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", exc_type=ImportError)

from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    RequestOffloadState,
    _create_req_context,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
    OffloadingConnector,
)
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext, TierFilter
from vllm.v1.request import Request

from raykv.base.ids import Key, group_of
from raykv.base.tenants import salt_label
from raykv.engine.hints import Allowed, Hint, HintBox
from raykv.engine.requests import RequestOptions, Tier
from raykv.protocol.sessions import SessionWord
from raykv.vllm.identity.media import NAMED_BY_CLIENT
from raykv.vllm.params import (
    HINTS,
    MOST_LOADED,
    OUR_MOST_STORED,
    OVER,
    PARAMS,
    PAUSE,
    PIN,
    PREFILLED,
    PRIORITY,
    SESSION,
    TENANT,
    TIERS,
    documented,
    hint_of,
    ignored,
    only_documented,
    request_options,
    tenant_of,
)
from tests.fixtures.vllm import CHUNK, FULL, WINDOW, Engine, PlayedRequest

VLLM_KEYS = (
    *("max_load_tokens", "max_offload_tokens", "kv_load_tiers", "do_remote_prefill"),
    *("do_remote_decode", "remote_kv_source", "remote_engine_id", "remote_host", "remote_port"),
    *("remote_block_ids", "node_id", "namespace", "pool_path", "raykv_namespace", "raykv_node", ""),
)
DOCUMENTED = {*PARAMS, *HINTS, PREFILLED, MOST_LOADED, OUR_MOST_STORED, TIERS}
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from([0, 1, "../../etc/passwd", "other-namespace", [{"medium": "DISK"}]]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
KEYS = st.one_of(
    st.sampled_from((*PARAMS, *HINTS, PREFILLED, *VLLM_KEYS)),
    st.text(max_size=12),
    st.integers(0, 9),
)
SENT = st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=6))


@settings(max_examples=120, deadline=None)
@given(sent=SENT)
def test_only_what_is_documented_has_an_effect(sent: Any) -> None:
    said = sent if isinstance(sent, dict) else {}
    load, store = (
        said[name] if isinstance(said.get(name), bool) else True
        for name in ("raykv_load", "raykv_store")
    )
    prefilled = said.get("raykv_prefilled") is True
    limit = said.get("max_offload_tokens")
    most = limit if type(limit) is int and limit >= 0 else None
    assert request_options(sent) == RequestOptions(load, store, prefilled, most_stored=most)
    kept = documented(sent)
    assert kept is None or (
        set(kept) <= DOCUMENTED and all(type(kept.get(name, True)) is bool for name in PARAMS)
    )


@pytest.mark.parametrize(
    ("sent", "hint"),
    [
        (None, Hint()),
        ({PIN: 60, PRIORITY: 9}, Hint(pin_s=60.0, priority=9)),
        ({PIN: 0.5}, Hint(pin_s=0.5)),
        ({PIN: True, PRIORITY: True}, Hint()),
        ({PIN: "60", PRIORITY: 1.0}, Hint()),
        ({PIN: float("nan"), PRIORITY: 0}, Hint()),
        ({PIN: float("inf"), PRIORITY: 10}, Hint()),
        ({PIN: 10**400, PRIORITY: -(10**400)}, Hint()),
        ({PIN: -1, PRIORITY: [1]}, Hint()),
        ({SESSION: "agent 7"}, Hint(session="agent 7")),
        ({SESSION: "a", OVER: True}, Hint(session="a", is_over=True)),
        ({SESSION: "a", PAUSE: 9, PRIORITY: 2}, Hint(session="a", pause_s=9.0, priority=2)),
        ({SESSION: "a", OVER: 1, PAUSE: "9"}, Hint(session="a")),
        ({SESSION: "a", OVER: False, PAUSE: 0}, Hint(session="a")),
        ({OVER: True, PAUSE: 9}, Hint()),
        ({SESSION: "", OVER: True}, Hint()),
        ({SESSION: "s" * 129}, Hint()),
        ({SESSION: "a\nb"}, Hint()),
        ({SESSION: 7}, Hint()),
    ],
)
def test_hint_is_what_its_keys_can_mean_and_nothing_else(sent: Any, hint: Hint) -> None:
    """A number in its range; a session with a printable name, without which the rest is nothing."""
    assert hint_of(sent) == hint


def envelope(*actions: tuple[str, str, dict[str, Any]]) -> KvHintsEnvelope:
    """What an orchestrator attaches to a request."""
    return KvHintsEnvelope("0.1", "message", [KvHintAction("action", *each) for each in actions])


@pytest.mark.parametrize(
    ("kv_hints", "hint"),
    [
        (None, Hint(session="a")),
        (
            envelope(("raykv.hints", "1", {OVER: True, SESSION: "b"})),
            Hint(session="b", is_over=True),
        ),
        (envelope(("raykv.hints", "1.2", {PRIORITY: 4})), Hint(session="a", priority=4)),
        (envelope(("raykv.hints", "2", {PRIORITY: 4})), Hint(session="a")),
        (envelope(("kv.fetch", "1", {PRIORITY: 4})), Hint(session="a")),
        (
            envelope(("raykv.hints", "1", {PRIORITY: 4}), ("raykv.hints", "1", {PIN: 5})),
            Hint(session="a", priority=4, pin_s=5.0),
        ),
        (envelope(*[("other", "1", {})] * 16, ("raykv.hints", "1", {PIN: 5})), Hint(session="a")),
        (envelope(("raykv.hints", "1", {"raykv_load": False, PIN: "x"})), Hint(session="a")),
        ("nonsense", Hint(session="a")),
    ],
)
def test_kv_hints_of_vllm_carry_the_same_wishes(kv_hints: Any, hint: Hint) -> None:
    assert hint_of({SESSION: "a"}, kv_hints) == hint


def hinting(allowed: Allowed, *kinds: Any, **fields: Any) -> tuple[Engine, HintBox, PlayedRequest]:
    """An engine that allows hints, and has begun with a request."""
    engine, request = Engine(kinds or (FULL,)), PlayedRequest(**fields)
    box = engine.connector._manager.hints = HintBox(allowed)
    engine.hold(0)
    engine.begin(request)
    return engine, box, request


def test_kv_hints_do_not_switch_loading_off() -> None:
    """They come to the manager as vLLM's request has them."""
    hints = envelope(("raykv.hints", "1", {SESSION: "agent", "raykv_load": False}))
    engine, box, request = hinting(Allowed.SESSION, kv_hints=hints)
    assert engine.schedule(request) == CHUNK
    (came,) = box.sessions.take()
    assert (came.session, came.word) == ("agent", SessionWord.CAME)


def groups_of(keys: Any) -> list[int]:
    return [group_of(Key(each)) for each in keys]


def test_session_is_told_all_chunks_of_its_request_at_the_end() -> None:
    """Those of full attention before those of windows."""
    params = {SESSION: "agent", OVER: True}
    engine, box, request = hinting(Allowed.SESSION, WINDOW, FULL, kv_transfer_params=params)
    engine.schedule(request)
    engine.finish(request)
    (came,) = box.sessions.take()
    assert came.word is SessionWord.CAME, "its last chunks are not stored yet"
    engine.connector._manager.on_request_finished(ReqContext(request.request_id))
    (last,) = box.sessions.take()
    assert last.word is SessionWord.OVER
    assert groups_of(last.keys) == [1] * 5 + [0] * 5


def made_request(sent: Any) -> Any:
    return Request(
        request_id="../../etc/passwd",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": sent}),
        pooling_params=None,
    )


@settings(max_examples=60, deadline=None)
@given(sent=SENT)
def test_vllms_offloading_scheduler_sees_nothing_of_the_rest(sent: Any) -> None:
    """With vLLM's own code: all that it makes of a request's params is how much may be loaded."""
    request = made_request(sent)
    config: Any = SimpleNamespace(kv_group_configs=[])
    with only_documented(request):
        context = _create_req_context(request)
        state = RequestOffloadState(
            config=config,
            req=request,
            req_context=context,
            offloading_context=RequestOffloadingContext(),
        )
    limit = sent.get("max_load_tokens") if isinstance(sent, dict) else None
    assert state.max_load_tokens == (limit if type(limit) is int and limit >= 0 else None)
    assert state.max_offload_tokens is None
    if not isinstance(sent, dict) or TIERS not in sent:
        assert context.load_tier_filter is TierFilter.ALL
    assert set(context.kv_transfer_params or {}) <= DOCUMENTED
    assert hint_of(context.kv_transfer_params) == hint_of(sent)
    assert request_options(context.kv_transfer_params) == request_options(sent)


@pytest.mark.parametrize(
    ("sent", "seen", "left"),
    [
        ({"do_remote_prefill": True, "raykv_load": False}, {"raykv_load": False}, True),
        *((said, None, False) for said in (["x"], "text", 5, 0.5, True)),
    ],
    ids=str,
)
def test_params_are_there_again_for_other_connectors_if_they_are_a_dictionary(
    sent: Any, seen: Any, left: bool
) -> None:
    """Else vLLM's scheduler, which calls `params.get` after the hook, would die of them."""
    request = made_request(sent)
    with only_documented(request):
        told = request.kv_transfer_params
    assert told == seen
    assert request.kv_transfer_params is (sent if left else None)


def test_connector_hands_on_only_what_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    vllms = OffloadingConnector.on_new_request

    def new(connector: OffloadingConnector, request: Any) -> None:
        seen.append(request.kv_transfer_params)
        vllms(connector, request)

    monkeypatch.setattr(OffloadingConnector, "on_new_request", new)
    engine = Engine()
    for sent in ({"max_load_tokens": 0, "raykv_store": False}, ["max_load_tokens"], None):
        engine.begin(made_request(sent))
    told = {"raykv_store": False, "max_load_tokens": 0}
    assert seen == [told, None, None]


@pytest.mark.parametrize(
    ("said", "tiers"),
    [
        ([{"medium": "cpu", "locality": "REMOTE"}], {Tier(is_disk=False, is_remote=True)}),
        (
            [{"medium": "STORAGE"}, {"medium": "tape"}, {"locality": ["LOCAL"]}, 7],
            {Tier(is_disk=True, is_remote=False), Tier(is_disk=True, is_remote=True)},
        ),
        ([], set()),
        ([{"medium": "tape"}], None),
        ("STORAGE", None),
        ([{}], set(starmap(Tier, product((False, True), repeat=2)))),
    ],
)
def test_request_has_chunks_fetched_from_some_tiers_alone(
    said: Any, tiers: set[Tier] | None
) -> None:
    engine = Engine()
    engine.begin(PlayedRequest(kv_transfer_params={"kv_load_tiers": said}))
    assert engine.view.requests.get("r").options.tiers == tiers


@pytest.mark.parametrize(("most", "loaded"), [(2 * CHUNK + 5, 2), (0, 0), (-1, 4), (True, 4)])
def test_request_loads_so_many_tokens_at_most(most: Any, loaded: int) -> None:
    engine = Engine()
    engine.hold(0, 1, 2, 3)
    request = PlayedRequest(kv_transfer_params={"max_load_tokens": most})
    engine.begin(request)
    assert engine.schedule(request) == loaded * CHUNK


@pytest.mark.parametrize(("most", "stored"), [(2 * CHUNK + 5, 2), (0, 0), ("2", 5)])
def test_request_stores_so_many_tokens_at_most(most: Any, stored: int) -> None:
    engine = Engine()
    request = PlayedRequest(kv_transfer_params={"max_offload_tokens": most})
    engine.begin(request)
    known = engine.connector._tables.find("r")
    plan = engine.connector._manager.prepare_store(known.keys[0], known.context)
    assert len(plan.keys_to_store) == stored


def test_chunks_of_full_attention_are_hinted_before_those_of_windows() -> None:
    """What exceeds the queue is left out, and windows alone serve nothing."""
    _, box, _ = hinting(Allowed.PIN, WINDOW, FULL, kv_transfer_params={PIN: 60.0})
    assert groups_of(box.take().pinned) == [1] * 5 + [0] * 5


def asked(salt: str | None = None, tenant: Any = None) -> SimpleNamespace:
    """What of a request says whose it is."""
    params = None if tenant is None else {TENANT: tenant}
    return SimpleNamespace(cache_salt=salt, kv_transfer_params=params)


NO_LABELS: list[Any] = [
    *("", "others", "salt:0123456789", "x" * 65, "two\nlines"),
    *(7, ["acme"], {}),
]
"""No tenant can have one of these."""


@pytest.mark.parametrize(
    ("asking", "by_server", "expected"),
    [
        (asked("a secret"), False, salt_label("a secret")),
        (asked(), False, ""),
        (asked(""), False, ""),
        (asked(f"{NAMED_BY_CLIENT} a secret"), False, salt_label("a secret")),
        (asked(f"{NAMED_BY_CLIENT} "), False, ""),
        (asked(tenant="acme"), True, "acme"),
        (asked("salt", "acme"), True, "acme"),
        (asked(tenant="acme"), False, ""),
        (asked("salt", "acme"), False, salt_label("salt")),
        *((asked(tenant=label), True, "") for label in NO_LABELS),
    ],
)
def test_tenant_is_its_salts_digest_or_the_label_of_a_server_that_sets_it(
    asking: Any, by_server: bool, expected: str
) -> None:
    """The salt stays the same where media were named by the client."""
    assert tenant_of(asking, by_server=by_server) == expected


def test_digest_of_a_salt_does_not_say_it() -> None:
    assert salt_label("a secret").startswith("salt:")
    assert "secret" not in salt_label("a secret")
    assert salt_label("a secret") != salt_label("another")


def test_request_is_its_tenants_from_its_first_hook_on() -> None:
    engine = Engine()
    request = PlayedRequest(cache_salt="a secret")
    engine.begin(request)
    label = salt_label("a secret")
    assert engine.view.requests.get("r").options.tenant == label
    engine.hold(*range(4))
    assert engine.schedule(request) > 0
    assert engine.view.found.take().tenants.distinct == [label]
    account = engine.view.accounts.get("r")
    assert account is not None
    assert account.tenant == label


@pytest.mark.parametrize(
    ("params", "allowed", "expected"),
    [
        ({"raykv_sesion": "a"}, Allowed.PIN, {"raykv_sesion": "did you mean raykv_session?"}),
        ({"raykv_xyz": 1}, Allowed.PIN, {"raykv_xyz": "there is no such key"}),
        ({PRIORITY: 3}, Allowed.NONE, {PRIORITY: "client_hints=none does not allow it"}),
        ({SESSION: "a", OVER: True}, Allowed.PRIORITY, dict.fromkeys((SESSION, OVER), "client_h")),
        ({PIN: 3}, Allowed.SESSION, {PIN: "client_hints=session"}),
        ({PAUSE: 9}, Allowed.PIN, {PAUSE: "or raykv_session is missing"}),
        ({OVER: False, PREFILLED: None, SESSION: None}, Allowed.PIN, {}),
        ({PRIORITY: 30}, Allowed.PIN, {PRIORITY: "its value is not allowed"}),
        ({PAUSE: float("nan"), SESSION: "a"}, Allowed.PIN, {PAUSE: "its value is not allowed"}),
        ({PAUSE: -1.0, SESSION: "a"}, Allowed.PIN, {PAUSE: "its value is not allowed"}),
        ({"raykv_load": "no"}, Allowed.PIN, {"raykv_load": "its value is not allowed"}),
        ({TENANT: "acme"}, Allowed.PIN, {TENANT: "tenant_source=server"}),
        ({"raykv_load": False, PIN: 3, SESSION: "a", "max_load_tokens": 1}, Allowed.PIN, {}),
        ({1: 2, "do_remote_prefill": True}, Allowed.NONE, {}),
        ("nonsense", Allowed.NONE, {}),
    ],
)
def test_key_without_effect_is_named_with_why(
    params: Any, allowed: Allowed, expected: dict[str, str]
) -> None:
    found = ignored(params, None, allowed, by_server=False)
    assert found.keys() == expected.keys()
    assert all(expected[name] in why for name, why in found.items())


def test_keys_in_hints_of_orchestrators_are_looked_at_too() -> None:
    hints = envelope(("raykv.hints", "1", {"raykv_pins": 1}), ("other", "1", {"raykv_x": 1}))
    found = ignored({}, hints, Allowed.PIN, by_server=False)
    assert found.keys() == {"raykv_pins"}


def test_ignored_keys_are_counted_and_logged_once_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    for number in range(3):
        params = {"raykv_sesion": "a", PRIORITY: 3}
        engine.begin(PlayedRequest(str(number), kv_transfer_params=params))
    said = [each.getMessage() for each in caplog.records if "said once" in each.getMessage()]
    assert sorted("raykv_sesion" in each for each in said) == [False, True]
    assert engine.connector._manager.hints.counters["hints_ignored"] == 6
    account = engine.view.accounts.get("0")
    assert account is not None
    assert account.ignored.keys() == {"raykv_sesion", PRIORITY}
