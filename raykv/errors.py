"""What can go wrong outside RayKV. Each message says what, with which value, and what to do."""

from __future__ import annotations


class RayKVError(Exception):
    """Base of all errors that RayKV raises on purpose."""


class SettingError(RayKVError):
    """A setting is unknown, malformed or impossible on this machine."""


class ClusterError(RayKVError):
    """The Ray cluster, or one of RayKV's actors in it, cannot be reached or started."""


class VersionError(RayKVError):
    """Two parts that must agree on a version do not, or vLLM's version is not supported.

    `is_mended`: the cause has been removed, the next try may succeed.
    """

    def __init__(self, what: str, *, is_mended: bool = False) -> None:
        super().__init__(what)
        self.is_mended = is_mended


class AttachError(RayKVError):
    """A NodeActor refused to serve a worker's KV cache."""


class HandleError(RayKVError):
    """A KV cache can't be shared with, or opened by, another process."""
