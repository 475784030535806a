"""What can go wrong outside RayKV. Each message says what, with which value, and what to do."""

from __future__ import annotations


class RayKVError(Exception):
    """Base of all errors that RayKV raises on purpose."""


class SettingError(RayKVError):
    """A setting is unknown, malformed or impossible on this machine."""


class ClusterError(RayKVError):
    """The Ray cluster, or one of RayKV's actors in it, cannot be reached or started."""


class NotFoundError(ClusterError):
    """What was asked for is not there: an answer of the cluster, not a failure."""


class VersionError(RayKVError):
    """Two parts that must agree on a version do not, or vLLM's version is not supported.

    `is_mended`: the cause has been removed, the next try may succeed.
    """

    def __init__(self, what: str, *, is_mended: bool = False) -> None:
        super().__init__(what)
        self.is_mended = is_mended


class MessageError(RayKVError, ValueError):
    """A message is not one that this version of RayKV sends; nothing of it was carried out.

    msgspec makes a `ValidationError` of a ValueError that comes while it decodes.
    """


class AttachError(RayKVError):
    """A NodeActor refused to serve a worker's KV cache."""


class DiskError(RayKVError):
    """A disk tier has no usable place."""


class ChunkFileError(RayKVError):
    """A file of chunks is damaged, or not one that this version of RayKV reads."""


class OtherFormatError(ChunkFileError):
    """A file of chunks is whole, and of a format that another version of RayKV reads."""


class HiddenStatesError(RayKVError):
    """There are no hidden states of a request, or no file of them; it says why."""


class ThreadError(RayKVError):
    """The system gives this process no more threads."""


class HandleError(RayKVError):
    """A KV cache can't be shared with, or opened by, another process."""


def cause_of(error: BaseException) -> BaseException:
    """What was raised in another actor, if Ray has wrapped it; otherwise the error itself."""
    return getattr(error, "cause", None) or error


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0] if lines else ''}"
