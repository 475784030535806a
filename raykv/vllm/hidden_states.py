"""RayKVHiddenStatesConnector: RayKVConnector that also captures hidden states.

vLLM's method `extract_hidden_states` writes them into a KV group of their own, so that RayKV stores
and loads them like KV: a prefix hit or a load from the cache brings the states too. When a
request has ended, its blocks stay until the NodeActor has copied the states out of them.

    EngineCore                              worker of rank 0                 NodeActor
    request is scheduled: a path ────────►  lock of the file
    request has ended: blocks, tokens ───►  one capture, with the lock ───►  copies, keeps, writes
    the blocks are free  ◄──────────────── "sent" ◄────────────────────────  copied, or refused
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorRole,
)

from raykv.base import errors, guard
from raykv.base.ids import GROUP_BYTES, Direction, Key, Refusal, in_group
from raykv.base.settings import Settings
from raykv.node.states.file import promise, settle
from raykv.protocol import columns, copies
from raykv.protocol.worker import KVLayout
from raykv.vllm import connector, kv_form, transfers
from raykv.worker.job import JobRequest

logger = logging.getLogger("raykv")

METHOD = "extract_hidden_states"

LAYERS = "cache_only_layers"
"""In the name of the layer that keeps the states, in vLLM's `ExtractHiddenStatesModel`."""

NOWHERE = "off"
"""Value in place of a folder: no files."""

SUFFIX = ".safetensors"

FIRST_JOB = 1 << 48
"""Numbers of captures: above those of vLLM's own jobs, which it counts from 0."""

STATES = Key(b"states" + bytes(GROUP_BYTES))
"""Stands for a chunk in the job of a capture, whose key tells the KV group."""

MAX_FILE_NAME = 200


@dataclass(frozen=True)
class StatesOrder:
    """What is to be captured of a request that has ended; `token_ids` as in `Capture`."""

    request_id: str
    path: str
    token_ids: bytes
    block_ids: list[int]


@dataclass
class HiddenStatesMetadata(transfers.RayKVConnectorMetadata):
    """RayKV's metadata, with the paths of requests that have begun and what is to be captured."""

    promised: dict[str, str] = field(default_factory=dict)
    orders: list[StatesOrder] = field(default_factory=list)


@dataclass(frozen=True)
class StatesLayer:
    """vLLM's layer that keeps the hidden states; `index` is its place in its KV group."""

    group_id: int
    index: int
    name: str
    spec: Any


def states_layer(kv_cache_config: Any) -> StatesLayer:
    """Find that layer, in a KV group of its own or among layers of the same kind.

    Raises:
        SettingError: there is not exactly one.
    """
    found = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        for index, (name, spec) in enumerate(
            zip(group.layer_names, kv_form.layer_specs(group), strict=True)
        ):
            if LAYERS in name.split("."):
                found.append(StatesLayer(group_id, index, name, spec))
    if len(found) != 1:
        raise errors.SettingError(
            f"RayKVHiddenStatesConnector needs one layer with the hidden states, and this model's "
            f"KV cache has {len(found)}: vLLM does not keep them apart for models like this one"
        )
    return found[0]


def refuse_other_methods(speculative_config: Any) -> None:
    """States exist only where vLLM extracts them.

    Raises:
        SettingError: it does not.
    """
    method = getattr(speculative_config, "method", None)
    if method != METHOD:
        raise errors.SettingError(
            f"RayKVHiddenStatesConnector needs speculative_config with method {METHOD!r}, the "
            f"number of speculative tokens 1, and the layers in draft_model_config; it has "
            f"{method!r}. Without hidden states take RayKVConnector"
        )


def states_folder(settings: Settings) -> str:
    """Where files go; empty: nowhere."""
    if settings.hidden_states_path == NOWHERE:
        return ""
    return settings.hidden_states_path or str(Path(tempfile.gettempdir()) / "raykv_hidden_states")


def file_name(request_id: str) -> str:
    """Name of a request's file in its folder, whatever a client has called its request."""
    plain = quote(request_id, safe="").replace(".", "%2E")
    if len(plain) > MAX_FILE_NAME:
        digest = hashlib.sha256(request_id.encode()).hexdigest()[:16]
        plain = f"{plain[: MAX_FILE_NAME - 17]}-{digest}"
    return plain + SUFFIX


class StatesPlanner:
    """The scheduler's side: paths, and what is to be captured. Does no I/O."""

    def __init__(self, folder: str, *, takes_client_paths: bool) -> None:
        self._folder = folder
        self._takes_client_paths = takes_client_paths
        self._has_warned = False
        # Of requests that were scheduled and have not ended.
        self._paths: dict[str, str] = {}
        self._orders: list[StatesOrder] = []

    def began(self, new_requests: Iterable[Any]) -> dict[str, str]:
        """Paths of requests that are scheduled for the first time; empty for no file."""
        promised = {}
        for request in new_requests:
            extra = getattr(request.sampling_params, "extra_args", None) or {}
            path = self._path(request.req_id, extra.get("kv_transfer_params"))
            self._paths[request.req_id] = path
            if path:
                promised[request.req_id] = path
        return promised

    def _path(self, request_id: str, params: Any) -> str:
        wish = params.get("hidden_states_path") if isinstance(params, dict) else None
        if isinstance(wish, str) and wish:
            if self._takes_client_paths:
                return wish
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a client names the path of its hidden states, which is ignored: "
                    "hidden_states_client_paths is off (said once)"
                )
        return str(Path(self._folder) / file_name(request_id)) if self._folder else ""

    def ended(self, request: Any, block_ids: list[int], block_tokens: int) -> str | None:
        """Note what is to be captured of a request; returns its path, None for nothing.

        Nothing: it was never scheduled, or taken back before its prompt was computed.
        """
        path = self._paths.pop(request.request_id, None)
        if path is None:
            return None
        tokens = _wanted_tokens(request)
        num_whole = min(len(tokens), request.num_computed_tokens, len(block_ids) * block_tokens)
        if not tokens or num_whole < len(request.prompt_token_ids):
            return None
        token_ids = np.array(tokens[:num_whole], "<i8").tobytes()
        num_blocks = -(-num_whole // block_tokens)
        order = StatesOrder(request.request_id, path, token_ids, list(block_ids[:num_blocks]))
        self._orders.append(order)
        return path

    def withdraw(self, request_id: str) -> None:
        """Nothing of a request will be captured after all: vLLM frees its blocks."""
        self._paths.pop(request_id, None)
        self._orders = [order for order in self._orders if order.request_id != request_id]

    def take_orders(self) -> list[StatesOrder]:
        """What has been noted since the last call."""
        orders, self._orders = self._orders, []
        return orders


def _wanted_tokens(request: Any) -> list[int]:
    """The prompt's tokens; with `include_output_tokens` the answer's too, except for the last one,
    which has been no step's input.
    """
    params = request.kv_transfer_params
    if request.prompt_token_ids is None:
        return []
    if isinstance(params, dict) and params.get("include_output_tokens") is True:
        return list(request.all_token_ids)[:-1]
    return list(request.prompt_token_ids)


class StatesWorker:
    """A worker's side. All methods run on its main thread."""

    def __init__(
        self, settings: Settings, group_id: int, form: copies.Capture, *, is_writer: bool
    ) -> None:
        """`group_id` is the KV group of the layer with the states; `form` is a capture of no
        request, which all are made of.
        """
        self._settings = settings
        self._group_id = group_id
        self._form = form
        self._is_writer = is_writer
        self._numbers = count(FIRST_JOB)
        # Descriptors of the locks of future files.
        self._locks: dict[str, int] = {}
        # Requests whose capture is under way.
        self._under_way: set[str] = set()
        self._sent: set[str] = set()

    def promise(self, paths: dict[str, str]) -> None:
        """Make the locks of files before anybody knows their paths."""
        if not self._is_writer:
            return
        for request_id, path in paths.items():
            if request_id in self._locks:
                continue
            try:
                is_default = not self._settings.hidden_states_path and str(
                    Path(path).parent
                ) == states_folder(self._settings)
                self._locks[request_id] = promise(path, own_folder=is_default)
            except (OSError, ValueError) as error:
                # ValueError: what a client has named is not a path.
                logger.warning("hidden states can't be written to %r: %s", path, error)

    def submit(self, worker: transfers.RayOffloadingWorker | None, order: StatesOrder) -> None:
        """Have a request's states copied; whatever goes wrong, it counts as sent."""
        if not self._is_writer:
            self._sent.add(order.request_id)
            return
        try:
            assert worker is not None, "there is no KV cache yet"
            worker.submit_capture(self._job(worker, order))
            self._under_way.add(order.request_id)
        except Exception as error:
            guard.report("RayKVHiddenStatesConnector.submit")
            self._end(order.request_id, f"they could not be asked for: {error}")

    def give_up(self, orders: Iterable[StatesOrder]) -> None:
        """It is unknown which of these were submitted; those that were not count as sent."""
        self._sent |= {order.request_id for order in orders} - self._under_way

    def _job(self, worker: transfers.RayOffloadingWorker, order: StatesOrder) -> JobRequest:
        lock_fd = self._locks.get(order.request_id, -1)
        capture = msgspec.structs.replace(
            self._form,
            request_id=order.request_id,
            token_ids=order.token_ids,
            # Without a lock nobody could wait for the file.
            path=order.path if lock_fd >= 0 else "",
            has_lock=lock_fd >= 0,
        )
        assert worker.namespace, "the NodeActor is not known yet"
        job = copies.CopyJob(
            next(self._numbers),
            int(Direction.STORE),
            worker.namespace,
            columns.Keys.of([in_group(STATES, self._group_id)]),
            columns.Numbers.of([len(order.block_ids)]),
            columns.Numbers.of([0]),
            columns.Numbers.of(order.block_ids),
            capture=capture,
        )
        return JobRequest(job, lock_fd)

    def take_results(self, results: Mapping[str, copies.CopyResult]) -> None:
        """Captures that have ended, by request."""
        for request_id, result in results.items():
            self._under_way.discard(request_id)
            said = ", ".join(Refusal(each).name for each in result.refusals).lower()
            self._end(request_id, f"the NodeActor has not copied them ({said})" * bool(said))

    @guard.guarded(lambda self, request_id, _reason: self._sent.add(request_id))
    def _end(self, request_id: str, reason: str) -> None:
        self._sent.add(request_id)
        lock_fd = self._locks.pop(request_id, -1)
        if lock_fd < 0:
            return
        if reason:
            # The NodeActor has given a better reason, if any.
            settle(lock_fd, reason)
        os.close(lock_fd)

    def finish(self, finished: Iterable[str]) -> set[str]:
        """Requests whose blocks are free now; `finished` have ended, captured or not."""
        for request_id in finished:
            if request_id in self._locks and request_id not in self._under_way:
                self._end(request_id, "the request was taken back before its prompt was computed")
                self._sent.discard(request_id)
        sent, self._sent = self._sent, set()
        return sent

    def close(self) -> None:
        """The engine ends. The NodeActor writes what it has, and reports that itself."""
        for request_id in list(self._locks):
            self._end(request_id, "" if request_id in self._under_way else "the engine has ended")


class RayKVHiddenStatesConnector(connector.RayKVConnector):
    """See the module's docstring; settings begin with `hidden_states_`."""

    def _start(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        refuse_other_methods(vllm_config.speculative_config)
        self._layer = states_layer(kv_cache_config)
        self._layers_of_group = len(
            kv_cache_config.kv_cache_groups[self._layer.group_id].layer_names
        )
        self._num_blocks = kv_cache_config.num_blocks
        super()._start(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            assert self._runtime is not None
            settings = self._runtime.settings
            self._planner = StatesPlanner(
                states_folder(settings), takes_client_paths=settings.hidden_states_client_paths
            )

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        with connector.logged_refusals():
            worker = self._worker.raykv
            assert worker is not None
            spec: Any = self._worker.spec
            form = self._form_of(kv_caches[self._layer.name], worker.layout, spec.settings)
        is_writer = spec.config.parallel.rank == 0
        self._states = StatesWorker(spec.settings, self._layer.group_id, form, is_writer=is_writer)

    def _form_of(self, cache: Any, layout: KVLayout, settings: Settings) -> copies.Capture:
        """Where states are in their layer's cache, [blocks, states, tokens of a block, numbers].

        Raises:
            SettingError: not where RayKV could find them.
        """
        spec = self._layer.spec
        index = layout.group_ids.index(self._layer.group_id)
        tensors = [layout.tensors[i] for i in layout.groups[index]]
        is_plain = (
            tuple(cache.shape)[::2] == (self._num_blocks, spec.block_size)
            # Where the layers of a block lie side by side, what is handed over is all of them.
            and len(tensors) == self._layers_of_group
            and tensors[self._layer.index].page_bytes
            in (spec.page_size_bytes, spec.unpadded_page_size_bytes)
        )
        if not is_plain:
            raise errors.SettingError(
                f"hidden states of shape {list(cache.shape)} lie together with other layers, where "
                "RayKV can't capture them: choose another VLLM_KV_CACHE_LAYOUT"
            )
        return copies.Capture(
            request_id="",
            token_ids=b"",
            num_states=int(cache.shape[1]),
            hidden_size=int(cache.shape[3]),
            dtype=str(cache.dtype).removeprefix("torch."),
            block_tokens=int(cache.shape[2]),
            strides=[int(cache.stride(axis)) for axis in (2, 1, 3)],
            most_bytes=settings.hidden_states_bytes,
            ttl_s=settings.hidden_states_ttl_s,
            layer=self._layer.index,
        )

    @property
    def _metadata(self) -> HiddenStatesMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HiddenStatesMetadata), metadata
        return metadata

    @guard.guarded(guard.nothing)
    def wait_for_save(self) -> None:
        """See `RayKVConnector.wait_for_save`; the locks of files are made here."""
        self._promise()
        super().wait_for_save()

    @guard.guarded(guard.nothing)
    def _promise(self) -> None:
        self._states.promise(self._metadata.promised)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `RayKVConnector.get_finished`; "sent" are requests whose states are copied."""
        self._submit_orders()
        _, received = super().get_finished(finished_req_ids)
        return self._take_sent(finished_req_ids), received

    def _give_up_orders(self) -> None:
        self._states.give_up(self._metadata.orders)

    @guard.guarded(_give_up_orders)
    def _submit_orders(self) -> None:
        orders = self._metadata.orders
        for order in orders:
            self._states.submit(self._worker.raykv, order)
        orders.clear()

    @guard.guarded(lambda *_: set())
    def _take_sent(self, finished_req_ids: set[str]) -> set[str]:
        """Requests whose blocks are free now; where it fails, with the next step."""
        if self._worker.raykv is not None:
            self._states.take_results(self._worker.raykv.take_captured())
        return self._states.finish(finished_req_ids)

    # Scheduler side

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        base = super().build_connector_meta(scheduler_output)
        assert isinstance(base, transfers.RayKVConnectorMetadata), base
        return HiddenStatesMetadata(
            **vars(base),
            promised=self._promised(scheduler_output),
            orders=self._planner.take_orders(),
        )

    @guard.guarded(lambda *_: {})
    def _promised(self, scheduler_output: Any) -> dict[str, str]:
        return self._planner.began(scheduler_output.scheduled_new_reqs)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._with_states(super().request_finished(request, block_ids), request, block_ids)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        answer = super().request_finished_all_groups(request, block_ids)
        group_id = self._layer.group_id
        own = block_ids[group_id] if len(block_ids) > group_id else []
        return self._with_states(answer, request, own)

    def _with_states(
        self, answer: tuple[bool, dict[str, Any] | None], request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The answer to vLLM that keeps the blocks and names the file."""
        is_busy, params = answer
        more = self._answer_of(request, block_ids)
        return (is_busy, params) if more is None else (True, {**(params or {}), **more})

    def _untold(self, request: Any, _block_ids: list[int]) -> None:
        self._planner.withdraw(request.request_id)

    @guard.guarded(_untold)
    def _answer_of(self, request: Any, block_ids: list[int]) -> dict[str, Any] | None:
        # While it is loading, its blocks hold nothing yet, and vLLM frees them with the load's end.
        blocks = [] if self._tables.is_loading(request.request_id) else block_ids
        path = self._planner.ended(request, blocks, self._layer.spec.block_size)
        if path is None:
            return None
        node = None if self._runtime is None else self._runtime.node
        answer: dict[str, Any] = {"hidden_states_request": request.request_id}
        if path:
            answer["hidden_states_path"] = path
        if node is not None:
            answer["hidden_states_node"] = node.node_id
        return answer

    def shutdown(self) -> None:
        super().shutdown()
        states = getattr(self, "_states", None)
        if states is not None:
            states.close()
