"""Writes deploy/kuberay/rendered/: each overlay as `kubectl kustomize` puts it together.

They are there to be read, applied without Kustomize, and checked where there is no kubectl. The
first lines name the overlay and a digest of all that it was made of.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

KUBERAY = Path(__file__).parent / "kuberay"
RENDERED = KUBERAY / "rendered"
SOURCES = ("base", "base-serve", "common", "components", "overlays")
OVERLAYS = tuple(sorted(path.name for path in (KUBERAY / "overlays").iterdir()))


def sources_digest() -> str:
    """Of every file that an overlay may be made of, names and contents."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((KUBERAY / folder).rglob("*")):
            if path.is_file():
                name = path.relative_to(KUBERAY).as_posix()
                digest.update(f"{name}\0{len(path.read_bytes())}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()


def header(overlay: str) -> str:
    """The first lines of a rendered overlay."""
    return (
        f"# `kubectl kustomize deploy/kuberay/overlays/{overlay}`, written by deploy/render.py.\n"
        f"# Made of: sha256 {sources_digest()}\n"
    )


def render(folder: Path) -> str:
    """What kubectl makes of a kustomization.

    Raises:
        subprocess.CalledProcessError: it is not one.
    """
    command = ["kubectl", "kustomize", str(folder)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


if __name__ == "__main__":
    RENDERED.mkdir(exist_ok=True)
    for old in RENDERED.glob("*.yaml"):
        old.unlink()
    for overlay in OVERLAYS:
        text = header(overlay) + render(KUBERAY / "overlays" / overlay)
        (RENDERED / f"{overlay}.yaml").write_text(text)
