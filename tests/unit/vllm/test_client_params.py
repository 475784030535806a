"""What a client may say in `kv_transfer_params`: nine keys. Nothing else has any effect."""

from __future__ import annotations

from itertools import product, starmap
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.kv_offload.base import ReqContext

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
from tests.fixtures.vllm import CHUNK, FULL, Engine, PlayedRequest

WINDOW = SlidingWindowSpec(
    block_size=CHUNK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=2 * CHUNK
)

VLLM_KEYS = (
    "max_load_tokens",
    "max_offload_tokens",
    "kv_load_tiers",
    "do_remote_prefill",
    "do_remote_decode",
    "remote_kv_source",
    "remote_engine_id",
    "remote_host",
    "remote_port",
    "remote_block_ids",
    "node_id",
    "namespace",
    "pool_path",
    "raykv_namespace",
    "raykv_node",
    "",
)
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
        set(kept) <= {*PARAMS, *HINTS, PREFILLED, MOST_LOADED, OUR_MOST_STORED, TIERS}
        and all(type(kept.get(name, True)) is bool for name in PARAMS)
    )
    hint = hint_of(sent)
    pin_s: Any = said.get("raykv_pin_s")
    priority: Any = said.get("raykv_priority")
    is_number = isinstance(pin_s, int | float) and not isinstance(pin_s, bool)
    can_be_meant = is_number and 0 < pin_s <= 30 * 86_400
    assert hint.pin_s == (pin_s if can_be_meant else None)
    is_whole = isinstance(priority, int) and not isinstance(priority, bool)
    assert hint.priority == (priority if is_whole and 1 <= priority <= 9 else None)
    session: Any = said.get("raykv_session")
    is_name = isinstance(session, str) and session.isprintable() and 0 < len(session) <= 128
    assert hint.session == (session if is_name else "")
    assert hint.is_over == (is_name and said.get("raykv_session_over") is True)
    assert hint.pause_s is None or is_name


@pytest.mark.parametrize(
    ("sent", "hint"),
    [
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
def test_session_is_a_printable_name_and_the_rest_needs_it(sent: Any, hint: Hint) -> None:
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


def test_kv_hints_do_not_switch_loading_off() -> None:
    """They come to the manager as vLLM's request has them."""
    engine = Engine()
    manager = engine.connector._manager
    assert manager is not None
    manager.hints = HintBox(Allowed.SESSION)
    hints = envelope(("raykv.hints", "1", {SESSION: "agent", "raykv_load": False}))
    engine.hold(0)
    request = PlayedRequest(kv_hints=hints)
    engine.begin(request)
    assert engine.schedule(request) == CHUNK
    (came,) = manager.hints.sessions.take()
    assert (came.session, came.word) == ("agent", SessionWord.CAME)


def test_session_is_told_all_chunks_of_its_request_at_the_end() -> None:
    """Those of full attention before those of windows."""
    engine = Engine((WINDOW, FULL))
    manager = engine.connector._manager
    assert manager is not None
    manager.hints = HintBox(Allowed.SESSION)
    request = PlayedRequest(kv_transfer_params={SESSION: "agent", OVER: True})
    engine.begin(request)
    engine.schedule(request)
    engine.finish(request)
    (came,) = manager.hints.sessions.take()
    assert came.word is SessionWord.CAME, "its last chunks are not stored yet"
    manager.on_request_finished(ReqContext(request.request_id))
    (last,) = manager.hints.sessions.take()
    count = request.num_prompt_tokens // CHUNK
    assert last.word is SessionWord.OVER
    assert [group_of(Key(each)) for each in last.keys] == [1] * count + [0] * count


def made_request(sent: Any) -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

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
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        RequestOffloadState,
        _create_req_context,
    )
    from vllm.v1.kv_offload.base import RequestOffloadingContext, TierFilter

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
    assert set(context.kv_transfer_params or {}) <= {
        *PARAMS,
        *HINTS,
        PREFILLED,
        MOST_LOADED,
        OUR_MOST_STORED,
        TIERS,
    }
    assert hint_of(context.kv_transfer_params) == hint_of(sent)
    assert request_options(context.kv_transfer_params) == request_options(sent)


@pytest.mark.parametrize(
    ("sent", "pin_s", "priority"),
    [
        ({"raykv_pin_s": 60, "raykv_priority": 9}, 60.0, 9),
        ({"raykv_pin_s": 0.5}, 0.5, None),
        ({"raykv_pin_s": True, "raykv_priority": True}, None, None),
        ({"raykv_pin_s": "60", "raykv_priority": 1.0}, None, None),
        ({"raykv_pin_s": float("nan"), "raykv_priority": 0}, None, None),
        ({"raykv_pin_s": float("inf"), "raykv_priority": 10}, None, None),
        ({"raykv_pin_s": 10**400, "raykv_priority": -(10**400)}, None, None),
        ({"raykv_pin_s": -1, "raykv_priority": [1]}, None, None),
        (None, None, None),
    ],
)
def test_hint_is_a_number_in_its_range_or_nothing(
    sent: Any, pin_s: float | None, priority: int | None
) -> None:
    hint = hint_of(sent)
    assert (hint.pin_s, hint.priority) == (pin_s, priority)


@pytest.mark.parametrize("sent", [["x"], "text", 5, 0.5, True])
def test_params_that_are_no_dictionary_do_not_reach_vllms_scheduler(sent: Any) -> None:
    """It calls `params.get` after the connector's hook: EngineCore would die of it."""
    request = made_request(sent)
    with only_documented(request):
        assert request.kv_transfer_params is None
    assert request.kv_transfer_params is None


def test_params_are_there_again_for_other_connectors() -> None:
    sent = {"do_remote_prefill": True, "raykv_load": False}
    request = made_request(sent)
    with only_documented(request):
        assert request.kv_transfer_params == {"raykv_load": False, "raykv_store": True}
    assert request.kv_transfer_params is sent


def test_connector_hands_on_only_what_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    seen: list[Any] = []
    vllms = OffloadingConnector.on_new_request

    def new(connector: OffloadingConnector, request: Any) -> None:
        seen.append(request.kv_transfer_params)
        vllms(connector, request)

    monkeypatch.setattr(OffloadingConnector, "on_new_request", new)
    engine = Engine()
    for sent in ({"max_load_tokens": 0, "raykv_store": False}, ["max_load_tokens"], None):
        engine.begin(made_request(sent))
    told = {"raykv_load": True, "raykv_store": False, "max_load_tokens": 0}
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
    engine = Engine((WINDOW, FULL))
    manager = engine.connector._manager
    assert manager is not None
    manager.hints = HintBox(Allowed.PIN)
    request = PlayedRequest(kv_transfer_params={PIN: 60.0})
    engine.begin(request)
    pinned = manager.hints.take().pinned
    count = request.num_prompt_tokens // CHUNK
    assert [group_of(Key(each)) for each in pinned] == [1] * count + [0] * count


def asked(salt: str | None = None, tenant: Any = None) -> SimpleNamespace:
    """What of a request says whose it is."""
    params = None if tenant is None else {TENANT: tenant}
    return SimpleNamespace(cache_salt=salt, kv_transfer_params=params)


def test_tenant_is_named_by_a_digest_of_its_salt() -> None:
    label = tenant_of(asked("a secret"), by_server=False)
    assert label == salt_label("a secret")
    assert label.startswith("salt:")
    assert "secret" not in label
    assert label != tenant_of(asked("another"), by_server=False)
    assert tenant_of(asked(), by_server=False) == tenant_of(asked(""), by_server=False) == ""


def test_tenant_stays_the_same_where_media_were_named_by_the_client() -> None:
    marked = asked(f"{NAMED_BY_CLIENT} a secret")
    assert tenant_of(marked, by_server=False) == salt_label("a secret")
    assert tenant_of(asked(f"{NAMED_BY_CLIENT} "), by_server=False) == ""


def test_label_of_a_tenant_counts_only_where_the_server_sets_it() -> None:
    assert tenant_of(asked(tenant="acme"), by_server=True) == "acme"
    assert tenant_of(asked("salt", "acme"), by_server=True) == "acme"
    assert tenant_of(asked(tenant="acme"), by_server=False) == ""
    assert tenant_of(asked("salt", "acme"), by_server=False) == salt_label("salt")


@pytest.mark.parametrize(
    "label", ["", "others", "salt:0123456789", "x" * 65, "two\nlines", 7, ["acme"], {}]
)
def test_label_that_no_tenant_can_have_is_none(label: Any) -> None:
    assert tenant_of(asked(tenant=label), by_server=True) == ""


def test_request_is_its_tenants_from_its_first_hook_on() -> None:
    engine = Engine()
    request = PlayedRequest(cache_salt="a secret")
    engine.begin(request)
    label = salt_label("a secret")
    assert engine.view.requests.get("r").options.tenant == label
    engine.hold(*range(4))
    assert engine.schedule(request) > 0
    assert engine.view.found.take().tenants == [label]
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
