"""RayKV's connector in vLLM's `MultiConnector`, behind one that loads within the step.

The other one knows each prompt's beginning. What it fails to load it reports with the result of the
step, as such connectors do: until then rubbish lies in the blocks, also in those that are computed
from it. RayKV's own loads come layer by layer, and never fail.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorWorkerMetadata,
)
from vllm.v1.outputs import ModelRunnerOutput

from raykv.vllm.connector import RayKVConnector
from tests.fixtures.vllm import CHUNK
from tests.simulation.layered_world import RUBBISH, AheadWorld, bind, prefix_names


class Within(KVConnectorMetadata):
    """Blocks that are loaded in this step, and what belongs into them."""

    def __init__(self, loads: dict[int, list[int]]) -> None:
        self.loads = loads


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """The other connector; `most` tokens of each prompt are known to it."""

    def __init__(self, most: int) -> None:
        # None of vLLM's configuration is needed.
        self.most = most
        self._num_local: dict[str, int] = {}
        self._loads: dict[int, list[int]] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._num_local[request.request_id] = num_computed_tokens
        whole = min(self.most, request.num_tokens - 1) // CHUNK * CHUNK
        return max(0, whole - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        first = self._num_local[request.request_id] // CHUNK
        names = prefix_names(request.all_token_ids)
        for at in range(first, first + num_external_tokens // CHUNK):
            block = blocks.blocks[0][at].block_id
            self._loads[block] = names[at * CHUNK : (at + 1) * CHUNK]

    def build_connector_meta(self, scheduler_output: Any) -> Within:
        loads, self._loads = self._loads, {}
        return Within(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: the world loads."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: the world loads."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""


class SiblingWorld(AheadWorld):
    """`losing`: how often a block does not come that the other connector loads."""

    def __init__(self, model: Path, seed: int, *, is_async: bool, most: int = 64) -> None:
        super().__init__(model, seed, 0.0, is_async=is_async, is_second=False)
        self.sibling = Sibling(most)
        several: Any = MultiConnector.__new__(MultiConnector)
        several._connectors = [self.sibling, self.connector]
        several._requests_to_connector, several._extra_async_saves = {}, {}
        several._all_support_hma = True
        ours: RayKVConnector = self.connector
        bind(several, self.scheduler)
        assert ours._kv_cache_manager is self.scheduler.kv_cache_manager
        self.losing = 0.0
        self.num_lost = 0
        self._within: dict[int, list[int]] = {}
        self._lost: set[int] = set()

    def _take_blocks(self, output: Any) -> None:
        super()._take_blocks(output)
        for block, names in self._within.items():
            is_lost = self.rng.random() < self.losing
            self.blocks[block] = [RUBBISH] * CHUNK if is_lost else names
            self._lost |= {block} if is_lost else set()

    def _execute(self, output: Any) -> ModelRunnerOutput:
        theirs, output.kv_connector_metadata = output.kv_connector_metadata.metadata
        self._within, self._lost = theirs.loads, set()
        result = super()._execute(output)
        told = result.kv_connector_output
        self.num_lost += len(self._lost)
        told.invalid_block_ids |= self._lost
        told.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(
            (None, told.kv_connector_worker_meta)
        )
        return result

    def check_pool(self) -> None:
        """Each chunk that can be loaded is what its key says."""
        named: dict[bytes, list[int]] = {}
        for asked in self.asked.values():
            names = prefix_names(asked.request.all_token_ids)
            for at, name in enumerate(asked.request.block_hashes):
                named[name] = names[at * CHUNK : (at + 1) * CHUNK]
        wrong = [
            key
            for key in self.view.loadable
            if self.place.content(key) != named[bytes(key)[: -len(GROUP)]]
        ]
        assert not wrong, f"{len(wrong)} of {len(self.view.loadable)} chunks have other bytes"


GROUP = b"\0\0\0\0"
"""What a key has behind the hash of its block."""
