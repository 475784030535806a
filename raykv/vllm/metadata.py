"""What goes between the two sides of the connector with each step, through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)

from raykv.engine.requests import FailedLoad
from raykv.protocol.measures import BreakerReport
from raykv.vllm.identity.adapters import AdapterUse
from raykv.worker.link import LinkTarget


@dataclass
class RayKVWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, with what failed; see `RayOffloadingManager.take_failures`.

    `node_epochs` has the epoch of the NodeActor that each rank reaches, 0 for none; `lines` what
    each says of its breaker, when that has changed. `adapters` have been loaded since the last
    step, by id, with the digests of their contents; empty where the ranks have not loaded the same.
    `weights_changed` says by what, once; empty: they have not. `barred` are requests that must not
    load any more.
    """

    failed_loads: list[FailedLoad] = field(default_factory=list)
    failed_stores: list[tuple[bytes, int]] = field(default_factory=list)
    node_epochs: dict[int, int] = field(default_factory=dict)
    lines: dict[int, BreakerReport] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)
    weights_changed: str = ""
    barred: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RayKVWorkerMetadata:
        """See `OffloadingWorkerMetadata.aggregate`."""
        assert isinstance(other, OffloadingWorkerMetadata), other
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata), base
        merged = RayKVWorkerMetadata(base.completed_jobs, base.transfer_stats)
        for part in (self, other):
            if isinstance(part, RayKVWorkerMetadata):
                merged.failed_loads += part.failed_loads
                merged.failed_stores += part.failed_stores
                merged.node_epochs.update(part.node_epochs)
                merged.lines.update(part.lines)
                merged.barred |= part.barred
                merged.weights_changed = merged.weights_changed or part.weights_changed
                for name, digest in part.adapters.items():
                    same = merged.adapters.get(name, digest) == digest
                    merged.adapters[name] = digest if same else ""
        return merged


@dataclass
class RayKVConnectorMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata, with where the NodeActor is.

    `stranded` are requests that vLLM has put to wait for a load that was never made up; the
    workers report them as failed. `stranded_blocks`: the same where vLLM does not wait.
    `adapters` are those of the requests with jobs; `beginning`: of those computed first in this
    step. `weights_changed`: at some time before this step.
    """

    target: LinkTarget | None = None
    stranded: list[str] = field(default_factory=list)
    stranded_blocks: list[int] = field(default_factory=list)
    adapters: dict[str, AdapterUse] = field(default_factory=dict)
    beginning: dict[str, AdapterUse] = field(default_factory=dict)
    weights_changed: bool = False
