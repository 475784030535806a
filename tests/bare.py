"""The environment of who installs RayKV and none of its extras, made without the network.

What the wheel declares, and what that declares in turn, is taken from this environment: the same
versions as the other tests have, and nothing else that happens to be installed beside them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def declared() -> set[str]:
    """Names of the distributions that `pip install .` brings here; the optional ones are not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[tuple[str, str]] = set()
    waiting = [Requirement(line) for line in project["dependencies"]]
    while waiting:
        wanted = waiting.pop()
        for extra in {"", *wanted.extras}:
            if (each := (canonicalize_name(wanted.name), extra)) not in found:
                found.add(each)
                waiting += _required(*each)
    return {name for name, _ in found}


def _required(name: str, extra: str) -> Iterable[Requirement]:
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def undeclared_modules() -> set[str]:
    """Top-level modules that are installed here and would not be in a bare environment."""
    ours = {*declared(), *_inside_of_ray(), "raykv"}
    return {
        module
        for module, owners in metadata.packages_distributions().items()
        if not ours & {canonicalize_name(owner) for owner in owners}
    }


def _inside_of_ray() -> Iterator[str]:
    """Distributions that Ray carries along; they are found once Ray has been imported."""
    inside = Path(str(metadata.distribution("ray").locate_file("ray")))
    for each in metadata.distributions():
        if Path(str(each.locate_file(""))).is_relative_to(inside):
            yield canonicalize_name(each.name)


def build_wheel(folder: Path) -> Path:
    """RayKV's wheel, out of a copy of the sources as they are."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    pip += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(pip, check=True, timeout=60)
    (wheel,) = folder.glob("raykv-*.whl")
    return wheel


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel and what it declares; returns its Python.

    pip refuses the wheel if anything of what it declares is missing or of another version.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for name in sorted(declared()):
        _link(metadata.distribution(name), site / "site-packages")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, timeout=60)
    return python


def _link(distribution: metadata.Distribution, target: Path) -> None:
    """Its files, as links, but not its scripts, which would start this environment's Python."""
    source = Path(str(distribution.locate_file("")))
    for file in distribution.files or ():
        if ".." in file.parts:
            continue
        link = target / file
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(source / file)


def bare_surroundings(home: Path) -> dict[str, str]:
    """Of a process in a bare environment: nothing leads it to these sources."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**mine, "HOME": str(home)}
