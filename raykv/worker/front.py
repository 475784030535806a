"""What a worker's line to its NodeActor does, and lines that are put in front of another one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from raykv.protocol.copies import CopyResult
from raykv.protocol.measures import BreakerReport
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkTarget

ALL_LAYERS = 1 << 30
"""More than there are: waits for the end of a job."""


class Link(Protocol):
    """`WorkerLink`, and whatever stands in for one; see there. For the worker's main thread."""

    @property
    def node_life(self) -> int:
        """See `WorkerLink.node_life`."""

    def breaker_report(self) -> BreakerReport:
        """See `WorkerLink.breaker_report`."""

    def set_target(self, target: LinkTarget) -> None:
        """See `WorkerLink.set_target`."""

    def submit(self, *requests: JobRequest) -> None:
        """See `WorkerLink.submit`."""

    def drain(self) -> list[CopyResult]:
        """See `WorkerLink.drain`."""

    def wait(self, job_ids: Collection[int]) -> None:
        """See `WorkerLink.wait`."""

    def finish(self, job_ids: Collection[int]) -> None:
        """See `WorkerLink.finish`."""

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        """See `WorkerLink.wait_layers`."""

    def close(self, timeout_s: float) -> None:
        """See `WorkerLink.close`."""


L = TypeVar("L", bound=Link)


class FrontLink(Generic[L]):
    """A link that hands on to another one, `_link`, what a subclass does not do itself."""

    def __init__(self, link: L) -> None:
        self._link = link

    @property
    def node_life(self) -> int:
        return self._link.node_life

    def breaker_report(self) -> BreakerReport:
        return self._link.breaker_report()

    def set_target(self, target: LinkTarget) -> None:
        self._link.set_target(target)

    def submit(self, *requests: JobRequest) -> None:
        self._link.submit(*requests)

    def drain(self) -> list[CopyResult]:
        return self._link.drain()

    def wait(self, job_ids: Collection[int]) -> None:
        self._link.wait(job_ids)

    def finish(self, job_ids: Collection[int]) -> None:
        self._link.finish(job_ids)

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        return self._link.wait_layers(job_ids, count)

    def close(self, timeout_s: float) -> None:
        self._link.close(timeout_s)
