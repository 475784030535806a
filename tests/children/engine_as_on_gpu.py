"""An engine on vLLM's CPU build that steps as vLLM does on a GPU: see `tests.fixtures.as_on_gpu`.

vLLM's processes import this file, too. What is changed of vLLM are two refusals: its platform of
CPUs turns asynchronous scheduling off, and its second model runner wants Triton, whose interpreter
does. On a GPU nothing is changed.
"""

from __future__ import annotations

import os
from typing import Any

ASYNC = "TEST_ASYNC_SCHEDULING"
SECOND = "VLLM_USE_V2_MODEL_RUNNER"


def is_for_cpus() -> bool:
    """Whether the torch that is installed is a build for CPUs; torch takes seconds to import."""
    import torch

    return torch.version.cuda is None


class InterpretedDriver:
    """Answers vLLM's question to Triton's drivers."""

    @staticmethod
    def is_active() -> bool:
        return True


class InterpretedBackend:
    driver = InterpretedDriver


def have_triton() -> None:
    """Before vLLM is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    backends["cpu"] = InterpretedBackend


def schedule_ahead() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(platform: Any, vllm_config: Any) -> None:
        check(platform, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


if os.environ.get(SECOND) == "1" and is_for_cpus():
    have_triton()
if os.environ.get(ASYNC) == "1" and is_for_cpus():
    schedule_ahead()


if __name__ == "__main__":
    from tests.fixtures.engine_child import main
    from tests.fixtures.forked_engine import fork_processes_of_vllm

    if is_for_cpus():
        fork_processes_of_vllm()
    main()
