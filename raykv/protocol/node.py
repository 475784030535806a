"""A NodeActor: what it is, what it counts, and what of its pool outlives it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.protocol.columns import MAX_ROWS
from raykv.protocol.measures import BreakerReport
from raykv.protocol.named.columns import Count, Text


class CaptureStats(msgspec.Struct, frozen=True):
    """Counters of a NodeActor since its start, and the bytes of states that are in its memory."""

    num_bytes: int = 0
    captured: int = 0
    bytes_captured: int = 0
    failed: int = 0
    files_written: int = 0
    files_failed: int = 0


class DiskStats(msgspec.Struct, frozen=True):
    """A disk tier since the NodeActor's start; sizes in bytes. `path` empty: there is none.

    `problem`: why nothing is written, in a sentence. `is_full`: it gives up old files for new ones,
    so that only what was used is worth a place.
    `tenant_bytes`: of its files, by tenant, as far as they are somebody's.
    """

    path: Text = ""
    problem: Text = ""
    most_bytes: int = 0
    used_bytes: int = 0
    num_files: int = 0
    num_chunks: int = 0
    bytes_written: int = 0
    chunks_written: int = 0
    bytes_read: int = 0
    chunks_read: int = 0
    files_evicted: int = 0
    files_damaged: int = 0
    chunks_damaged: int = 0
    writes_failed: int = 0
    is_full: bool = False
    tenant_bytes: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}


class NodeStats(msgspec.Struct, frozen=True):
    """Counters and gauges of one NodeActor since its start; sizes in bytes.

    `metrics_address`: where Prometheus finds them ("host:port"), empty if nowhere; then
    `metrics_problem` says why, unless they are switched off.
    """

    pool_bytes: int = 0
    prefaulted_bytes: int = 0
    used_bytes: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    chunks_loaded: int = 0
    chunks_refused: int = 0
    jobs_cancelled: int = 0
    num_workers: int = 0
    queued_jobs: int = 0
    bytes_fetched: int = 0
    chunks_fetched: int = 0
    fetches_failed: int = 0
    bytes_nixl: int = 0
    bytes_sent: int = 0
    reading: int = 0
    quarantined: int = 0
    breakers: BreakerReport = BreakerReport()
    ranks: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}
    locked_bytes: int = 0
    metrics_address: Text = ""
    metrics_problem: Text = ""
    disk: DiskStats = DiskStats()
    states: CaptureStats = CaptureStats()
    threads_failed: int = 0


class NixlEnd(msgspec.Struct, frozen=True):
    """How other nodes reach a NodeActor's pool through NIXL; without `metadata` they can't."""

    metadata: bytes = b""


class NodeDescription(msgspec.Struct, frozen=True):
    """Where the workers of a node find its NodeActor, what it is, or why it has no pool."""

    version: int
    raykv_version: str
    node_id: str
    life: int
    socket_name: str
    pool_bytes: int
    slab_bytes: int
    prefaulted_bytes: int
    pid: int
    num_workers: int
    pool_path: str = ""
    stats: NodeStats = NodeStats()
    refusal: str = ""
    nixl: NixlEnd = NixlEnd()


class Kept(msgspec.Struct, frozen=True):
    """What of a node's pool outlives its NodeActor, in chunks.

    `place`: the folder or file that has it, empty if there is none. `left` chunks are not there;
    `problem` may say why.
    """

    node_id: str
    place: str = ""
    kept: int = 0
    left: int = 0
    problem: str = ""
