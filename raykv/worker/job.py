"""A copy job as an engine's thread hands it over to the line, and what has become of it there."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from raykv.base.ids import Direction
from raykv.protocol.columns import Handles
from raykv.protocol.named.captures import Capture
from raykv.protocol.worker import CopyJob


@dataclass(frozen=True)
class JobRequest:
    """A copy job before it has an epoch: what the engine's thread hands over."""

    job_id: int
    direction: Direction
    node_epoch: int
    handles: Handles
    groups: list[int]
    num_blocks: list[int]
    first_block: list[int]
    block_ids: list[int]
    by_layer: bool = False
    capture: Capture | None = None
    lock_fd: int = -1
    """Of the file that a capture becomes; the caller closes it when the job has ended."""
    torn: Handles = field(default_factory=Handles)
    """Chunks of a store whose blocks are not all known: they have failed and are not sent."""
    namespace: str = ""
    """Of all chunks; empty: the one of the line."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its message, at most."""
        tokens = 0 if self.capture is None else len(self.capture.token_ids)
        return tokens + 9 * len(self.block_ids) + (64 << 10)

    def message(self) -> CopyJob:
        """The job as it goes to the NodeActor."""
        return CopyJob(
            self.job_id,
            int(self.direction),
            self.node_epoch,
            self.handles,
            self.groups,
            self.num_blocks,
            self.first_block,
            self.block_ids,
            self.capture,
            self.by_layer,
            self.namespace,
        )


class Stage(enum.Enum):
    """See `raykv.worker.link`."""

    QUEUED = "queued"
    FLYING = "flying"
    CANCELLING = "cancelling"


@dataclass(slots=True)
class PendingJob:
    """A job that has not ended; so many `layers` of it are there."""

    request: JobRequest
    deadline: float
    stage: Stage = Stage.QUEUED
    layers: int = 0
