"""NIXL itself: an agent that registers memory and reads the memory of others, through UCX."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raykv.base.errors import RayKVError, first_line

UCX_ENVIRONMENT = {"UCX_MEM_EVENTS": "n", "UCX_HANDLE_ERRORS": "none"}
"""UCX would write over the code of `mmap`, `madvise` and others, while other threads run it: that
has ended a NodeActor. And it would catch the signals of crashes, which Ray and Python report.
"""


class NixlError(RayKVError):
    """NIXL can't be loaded, or a transfer has failed."""


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes to be read: addresses in the memory of here and there."""

    here: int
    there: int
    num_bytes: int


class NixlAgent:
    """NIXL with its UCX back end; any thread may call.

    Args:
        name: unique among all agents that meet.

    Raises:
        NixlError: NIXL is not installed, or does not work here.
    """

    def __init__(self, name: str) -> None:
        os.environ.update(UCX_ENVIRONMENT)
        try:
            nixl = importlib.import_module("nixl")
            strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = nixl.nixl_agent(name, nixl.nixl_agent_config(sync_mode=strict))
        except Exception as error:
            raise NixlError(f"{type(error).__name__}: {first_line(error)}") from error
        if "UCX" not in self._agent.backends:
            raise NixlError("NIXL has no UCX back end")

    def register(self, address: int, num_bytes: int) -> None:
        """Let memory be read by others, and be read into."""
        with _nixl_errors():
            self._agent.register_memory([(address, num_bytes, 0, "")], "DRAM")

    def metadata(self) -> bytes:
        """How other agents reach what is registered now."""
        with _nixl_errors():
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """Learn how to reach another agent; returns its name."""
        with _nixl_errors():
            name = self._agent.add_remote_agent(metadata)
        return str(name.decode() if isinstance(name, bytes) else name)

    def read(self, remote: str, parts: Sequence[Part]) -> Any:
        """Begin a transfer; returns its handle, which must be released."""
        with _nixl_errors():
            here = self._agent.get_xfer_descs([(p.here, p.num_bytes, 0) for p in parts], "DRAM")
            there = self._agent.get_xfer_descs([(p.there, p.num_bytes, 0) for p in parts], "DRAM")
            handle = self._agent.initialize_xfer("READ", here, there, remote)
            self._agent.transfer(handle)
        return handle

    def is_done(self, handle: Any) -> bool:
        """Whether all bytes are there.

        Raises:
            NixlError: the transfer has failed.
        """
        with _nixl_errors():
            state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise NixlError("the transfer has failed")
        return bool(state == "DONE")

    def release(self, handle: Any) -> None:
        """The transfer has ended."""
        with _nixl_errors():
            self._agent.release_xfer_handle(handle)


@contextmanager
def _nixl_errors() -> Iterator[None]:
    """Whatever NIXL raises is a `NixlError`."""
    try:
        yield
    except Exception as error:
        raise NixlError(f"{type(error).__name__}: {first_line(error)}") from error
