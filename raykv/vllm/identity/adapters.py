"""Which LoRA adapter a request's KV was computed with: by content, in the hashes of its blocks.

vLLM hashes an adapter's name and path into every block. In EngineCore its function for that is
wrapped, and adds the digest of the adapter's files as they are when the request comes: all keys
follow from these hashes, and vLLM's own cache keeps them apart too. Only the workers know which
weights were really used: they load adapters late, again after an eviction, and in place. So the
function that loads one is wrapped there, and a worker neither loads nor stores chunks of a request
whose adapter is not the one that its hashes name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from raykv.prompts import adapters
from raykv.prompts.block_hashes import path_with_digest
from raykv.vllm.internals import engine

logger = logging.getLogger("raykv")

# By vLLM's `Request`: the digest of its adapter that is in its hashes.
_digests: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class AdapterUse:
    """The adapter that a request's hashes name. `reloads`: vLLM reads it anew with each step."""

    adapter_id: int
    path: str
    digest: str
    reloads: bool


@engine.around
def _with_digest(hashed: Any, request: Any) -> Any:
    found = hashed(request)
    digest = _digest_of(request) if found else ""
    if not digest:
        return found
    return [(kind, name, path_with_digest(path, digest)) for kind, name, path in found]


def _digest_of(request: Any) -> str:
    """The same for all blocks of a request; empty if its adapter's content is unknown."""
    if request not in _digests:
        _digests[request] = adapters.content(request.lora_request.lora_path).digest
    return _digests[request]


class AdapterUses:
    """In EngineCore: what requests use, and what the workers say they have loaded."""

    def __init__(self) -> None:
        self._uses: dict[str, AdapterUse] = {}
        self._loaded: dict[int, str] = {}
        # False: this vLLM hashes adapters in another way.
        self._is_named = engine.wrap_adapter_hashes(_with_digest)
        # Adapters of which the log says that they cannot be named.
        self._said: set[str] = set()

    def begin(self, request: Any) -> bool:
        """A request is new; False: it must neither load nor store."""
        self._uses.pop(request.request_id, None)
        adapter = getattr(request, "lora_request", None)
        if adapter is None:
            return True
        digest = _digest_of(request) if self._is_named else ""
        loaded = self._loaded.get(adapter.lora_int_id, digest)
        if not digest or (loaded != digest and not adapter.load_inplace):
            self._say(adapter, bool(digest))
            return False
        self._uses[request.request_id] = AdapterUse(
            adapter.lora_int_id, adapter.lora_path, digest, adapter.load_inplace
        )
        return True

    def _say(self, adapter: Any, is_read: bool) -> None:
        if adapter.lora_name in self._said or len(self._said) >= 1000:
            return
        self._said.add(adapter.lora_name)
        why = (
            "its files are no longer those that the engine has loaded: load it in place"
            if is_read
            else "its files can't be read: RayKV names adapters in local folders only"
        )
        logger.warning(
            "requests with the adapter %s (%s) neither load nor store: %s (logged once)",
            adapter.lora_name,
            adapter.lora_path,
            why,
        )

    def take_loaded(self, loaded: Mapping[int, str]) -> None:
        """The workers have loaded adapters with these digests, by id; empty: unknown ones."""
        self._loaded.update(loaded)

    def of(self, request_ids: set[str]) -> dict[str, AdapterUse]:
        """Return the adapters of those requests that use one."""
        return {name: self._uses[name] for name in request_ids & self._uses.keys()}

    def end(self, request_ids: set[str]) -> None:
        """Requests have ended, and their last stores are on their way."""
        for name in request_ids & self._uses.keys():
            del self._uses[name]


class LoadedAdapters:
    """In a worker: what it has loaded. All calls are of its main thread."""

    def __init__(self) -> None:
        self._contents: dict[int, adapters.Content] = {}
        # How often an id's content has changed.
        self._changes: dict[int, int] = {}
        # By request: the number of changes when it was computed first; None: with another adapter.
        self._begun: dict[str, int | None] = {}
        self._news: dict[int, str] = {}

    def note(self, adapter_id: int, content: adapters.Content) -> None:
        """An adapter is loaded; `UNKNOWN` if its files changed meanwhile."""
        before = self._contents.get(adapter_id, adapters.UNKNOWN)
        if not content.digest or content.digest != before.digest:
            self._changes[adapter_id] = self._changes.get(adapter_id, 0) + 1
        self._contents[adapter_id] = content
        self._news[adapter_id] = content.digest

    def take_news(self) -> dict[int, str]:
        """Digests of what was loaded since the last call, by id."""
        news, self._news = self._news, {}
        return news

    def may_load(self, use: AdapterUse) -> bool:
        """Whether a request that is about to be computed will be with this adapter."""
        if use.adapter_id in self._contents and not use.reloads:
            return self._is(use)
        return adapters.content(use.path).digest == use.digest

    def begin(self, uses: Mapping[str, AdapterUse]) -> None:
        """These requests were in the step that ends; what they began with counts for good."""
        for name, use in uses.items():
            if name not in self._begun:
                self._begun[name] = self._changes.get(use.adapter_id) if self._is(use) else None

    def may_store(self, request_id: str, use: AdapterUse) -> bool:
        """Whether all that was computed for the request was with this adapter."""
        began = self._begun.get(request_id)
        return began is not None and began == self._changes[use.adapter_id] and self._is(use)

    def _is(self, use: AdapterUse) -> bool:
        known = self._contents.get(use.adapter_id, adapters.UNKNOWN)
        return known.digest == use.digest and adapters.is_unchanged(use.path, known)

    def end(self, request_ids: set[str]) -> None:
        """Requests have ended."""
        for name in request_ids & self._begun.keys():
            del self._begun[name]


# By the identity of vLLM's `LoRAConfig`, which an engine's manager and its connector both have.
_loaded: dict[int, tuple[Any, LoadedAdapters]] = {}


def watch_loads(lora_config: Any) -> LoadedAdapters:
    """What the worker with this configuration loads from now on; None stands for no adapters.

    With a vLLM that loads adapters in another way it stays empty, and nothing is stored with them.
    """
    loaded = LoadedAdapters()
    if lora_config is None:
        return loaded
    engine.wrap_adapter_loads(_noted)
    _loaded[id(lora_config)] = (lora_config, loaded)
    return loaded


@engine.around
def _noted(loads: Any, manager: Any, lora_request: Any) -> Any:
    _, loaded = _loaded.get(id(engine.adapter_settings_of(manager)), (None, None))
    if loaded is None:
        return loads(manager, lora_request)
    before = adapters.content(lora_request.lora_path)
    adapter = loads(manager, lora_request)
    after = adapters.content(lora_request.lora_path)
    loaded.note(lora_request.lora_int_id, after if after == before else adapters.UNKNOWN)
    return adapter
