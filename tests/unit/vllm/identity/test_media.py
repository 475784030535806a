"""Images and sound that a client names itself are not shared under that name."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import vllm.plugins
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.inputs import mm_input
from vllm.multimodal.inputs import MultiModalKwargsItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.v1.engine.input_processor import InputProcessor

from raykv.vllm import plugin
from raykv.vllm.identity import media
from raykv.vllm.identity.media import NAMED_BY_CLIENT, is_ours, may_share_media

DIGEST = "0123456789abcdef" * 4


METHODS: list[tuple[Any, str]] = [
    (BaseRenderer, "_process_tokens"),
    (BaseRenderer, "_process_tokens_async"),
    (InputProcessor, "process_inputs"),
]


def as_vllm_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the wrappers off until the test ends."""
    for owner, name in METHODS:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, getattr(method, "__wrapped__", method))
    monkeypatch.setattr(media, "_is_watching", False)


@pytest.fixture(autouse=True)
def _watching(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrappers are on in each test, and as they were afterwards."""
    as_vllm_made_it(monkeypatch)
    media.watch_prompts()


def config(connector: str | None = "RayKVConnector", **extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra)
    return SimpleNamespace(kv_transfer_config=transfer if connector else None)


class Renderer(BaseRenderer[Any]):
    """vLLM's, without a model: media get the names that they are given."""

    def __init__(self, vllm_config: Any) -> None:
        self.config = vllm_config

    def render_messages(self, *_arguments: Any, **_more: Any) -> Any:
        raise NotImplementedError

    def _process_multimodal(self, *arguments: Any, **more: Any) -> Any:
        given = (more["mm_uuids"] or {"image": [None]})["image"]
        names = [name or DIGEST for name in ([given] if isinstance(given, str) else given)]
        return mm_input([1, 2], MultiModalKwargsItems({}), {"image": names}, {"image": []})

    async def _process_multimodal_async(self, *arguments: Any, **more: Any) -> Any:
        return self._process_multimodal(*arguments, **more)


def prompt(uuids: Any, salt: str | None = None) -> Any:
    made = {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": ["pixels"]}}
    made |= {} if uuids is None else {"multi_modal_uuids": uuids}
    return made | ({} if salt is None else {"cache_salt": salt})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("uuids", "salt", "expected"),
    [
        (None, None, None),
        ({"image": [None]}, None, None),
        ({"image": [None]}, "mine", "mine"),
        ({"image": [None, "cat"]}, None, f"{NAMED_BY_CLIENT} "),
        ({"image": "cat"}, None, f"{NAMED_BY_CLIENT} "),
        ({"image": [DIGEST]}, None, f"{NAMED_BY_CLIENT} "),
        ({"image": ["cat"]}, "mine", f"{NAMED_BY_CLIENT} mine"),
    ],
)
def test_prompt_with_names_of_a_client_gets_a_salt_that_says_so(
    uuids: Any, salt: str | None, expected: str | None, is_async: bool
) -> None:
    renderer, given = Renderer(config()), prompt(uuids, salt)
    if is_async:
        made: Any = asyncio.run(renderer._process_tokens_async(given))
    else:
        made = renderer._process_tokens(given)
    assert made.get("cache_salt") == expected
    assert given == prompt(uuids, salt)


@pytest.mark.parametrize("uuids", [{"image": [DIGEST, "cat"]}, {"image": DIGEST}])
def test_name_of_a_client_that_looks_like_a_digest_is_no_name_of_content(uuids: Any) -> None:
    made: Any = Renderer(config())._process_tokens(prompt(uuids, "mine"))
    first, *others = made["mm_hashes"]["image"]
    assert not media._DIGEST.fullmatch(first)
    assert others == uuids["image"][1:] if isinstance(uuids["image"], list) else not others


@pytest.mark.parametrize("uuids", [{"image": ["cat"]}, {"image": [DIGEST]}])
def test_prompt_for_an_engine_without_raykv_stays_as_it_is(uuids: Any) -> None:
    made: Any = Renderer(config(None))._process_tokens(prompt(uuids))
    assert "cache_salt" not in made
    assert made["mm_hashes"] == uuids


def test_prompt_of_text_is_handed_on_as_it_is() -> None:
    text: Any = {"prompt_token_ids": [1, 2], "cache_salt": "mine"}
    assert media._marked(Renderer(config()), text) is text
    rendered = Renderer(config())._process_tokens(text)
    assert taken(rendered, config()) is rendered
    assert rendered.get("cache_salt") == "mine"
    assert media._SEEN not in rendered


def test_connector_is_found_among_others() -> None:
    inner = [{"kv_connector": "RayKVConnector"}]
    assert is_ours(config("MultiConnector", connectors=inner))
    assert is_ours(config("RayKVHiddenStatesConnector"))
    assert not is_ours(config("NixlConnector"))
    assert not is_ours(config("MultiConnector", connectors=[{"kv_connector": "NixlConnector"}]))


def taken(rendered: Any, vllm_config: Any) -> Any:
    """The prompt that vLLM makes a request of."""
    process = media._checking(lambda _self, _id, prompt, *_a, **_k: prompt)
    return process(SimpleNamespace(vllm_config=vllm_config), "r", rendered, None, ())


def test_media_that_were_not_rendered_here_are_not_believed() -> None:
    brought: Any = mm_input([1], MultiModalKwargsItems({}), {"image": [DIGEST]}, {"image": []})
    assert taken(brought, config())["cache_salt"] == f"{NAMED_BY_CLIENT} "
    salted = {**brought, "cache_salt": "mine"}
    assert taken(salted, config())["cache_salt"] == f"{NAMED_BY_CLIENT} mine"
    assert taken(brought, config(None)) is brought
    rendered = Renderer(config())._process_tokens(prompt(None))
    assert taken(rendered, config()) is rendered
    assert "cache_salt" not in rendered


def request(name: str | None, salt: str | None = None, adapter: str = "") -> Any:
    feature = SimpleNamespace(mm_hash=name, identifier=f"{adapter}{name}")
    features = [] if name is None else [feature]
    return SimpleNamespace(mm_features=features, cache_salt=salt)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (request(None), True),
        (request(None, f"{NAMED_BY_CLIENT} "), True),
        (request(DIGEST), True),
        (request(DIGEST * 2), True),
        (request(DIGEST, adapter="french:"), True),
        (request(DIGEST, "mine"), True),
        (request(DIGEST, f"{NAMED_BY_CLIENT} "), False),
        (request(DIGEST, f"{NAMED_BY_CLIENT} mine"), False),
        (request("cat"), False),
        (request("cat", "mine"), False),
        (request(f"client-{DIGEST}"), False),
        (request("renderer0-mm-5-image-0"), False),
        (request("renderer0-mm-5-image-0", "mine"), False),
        (SimpleNamespace(mm_features=[object()], cache_salt=None), False),
    ],
)
def test_request_shares_its_media_that_are_named_by_content(given: Any, expected: bool) -> None:
    assert may_share_media(given) is expected


def test_media_are_refused_with_one_warning_where_vllm_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(media, "_is_watching", False)
    monkeypatch.setattr(logging.getLogger("raykv"), "propagate", True)
    media._warn.cache_clear()
    assert not may_share_media(request(DIGEST))
    assert not may_share_media(request(DIGEST, "mine"))
    assert may_share_media(request(None))
    assert [each.levelname for each in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("owner", "name"), METHODS)
def test_plugin_leaves_vllm_as_it_is_where_a_method_is_missing(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    as_vllm_made_it(monkeypatch)
    monkeypatch.delattr(owner, name)
    monkeypatch.delitem(KVConnectorFactory._registry, "RayKVConnector", raising=False)
    monkeypatch.delitem(KVConnectorFactory._registry, "RayKVHiddenStatesConnector", raising=False)
    plugin.register()
    assert "RayKVConnector" in KVConnectorFactory._registry
    assert not media._is_watching
    for each, method in METHODS:
        assert not hasattr(getattr(each, method, None), "__wrapped__")


def test_process_of_vllm_watches_once_although_it_loads_its_plugins_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_vllm_made_it(monkeypatch)
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    for _ in range(2):
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        vllm.plugins.load_general_plugins()
    assert media._is_watching
    for owner, name in METHODS:
        assert not hasattr(getattr(owner, name).__wrapped__, "__wrapped__")


class OneImage:
    """Its content, as vLLM's hasher asks for it."""

    def __len__(self) -> int:
        return 1

    def get_all_items_for_hash(self) -> list[str]:
        return ["pixels"]


def test_vllm_takes_a_client_s_name_for_the_hash_of_the_content() -> None:
    items: Any = {"image": OneImage()}
    named = ProcessorInputs([1], items, {"image": [DIGEST]})
    assert named.get_mm_hashes("model", "blake3") == {"image": [DIGEST]}
    hashed = ProcessorInputs([1], items).get_mm_hashes("model", "blake3")["image"]
    assert media._DIGEST.fullmatch(hashed[0])
    assert hashed != [DIGEST]
