"""vLLM's example connector for hidden states, made to run on CPUs, for comparison.

What it does there needs CUDA in two places only: pinned memory for the copy, and an event that says
when that is done. Here the copy is done when it has been made; all else is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
)


def connector(folder: str) -> dict[str, Any]:
    """What an engine's configuration says to use it."""
    return {
        "kv_connector": "ExampleStatesOnCPU",
        "kv_connector_module_path": __name__,
        "kv_connector_extra_config": {"shared_storage_path": folder},
    }


class _Done:
    """In place of a CUDA event, of something that has happened already."""

    def record(self, _stream: Any = None) -> None:
        """It has."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Whether it has happened."""
        return True


class _Stream:
    """In place of a CUDA stream: what is sent there is done at once."""

    def wait_event(self, _event: Any) -> None:
        """Return at once."""


class _Pageable(TorchFunctionMode):
    """Memory is pinned for a GPU alone."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        return func(*args, **more)


@contextmanager
def _without_gpu() -> Iterator[None]:
    """In which torch's events and streams are those above, as vLLM's CPU worker has it too."""
    instead = {"Event": _Done, "Stream": _Stream, "stream": lambda _stream: nullcontext()}
    kept = {name: getattr(torch.cuda, name) for name in instead}
    try:
        for name, each in instead.items():
            setattr(torch.cuda, name, each)
        with _Pageable():
            yield
    finally:
        for name, each in kept.items():
            setattr(torch.cuda, name, each)


class ExampleStatesOnCPU(ExampleHiddenStatesConnector):
    """See the module's docstring."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        with _without_gpu():
            answer: tuple[set[str] | None, set[str] | None] = super().get_finished(finished_req_ids)
        return answer
