"""The house: packages of `raykv` by floors, and which of their files touch what is outside.

A package imports from packages on lower floors and from itself. A file is *pure* unless it is one
of its package's shells: it gets the time and anything random as arguments, and knows no Ray, torch,
vLLM, thread, socket or file.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHILDREN = ROOT / "tests" / "children"
"""Programs that tests start."""
SOURCES = sorted((ROOT / "raykv").rglob("*.py"))

ALL = "all"


@dataclass(frozen=True)
class Room:
    """A package of the house.

    `packages` are what it may import from outside, besides the standard library; `ALL`: anything.
    `shells` are its files that may be impure, without suffix.
    """

    floor: int
    packages: str = ""
    shells: str = ""

    def allows(self, package: str) -> bool:
        return self.packages == ALL or package in self.packages.split()

    def has_shell(self, name: str) -> bool:
        return self.shells == ALL or name in self.shells.split()


HOUSE = {
    "cli": Room(11, ALL, ALL),
    "lab": Room(10, ALL, ALL),
    "serve": Room(9, ALL, ALL),
    "vllm": Room(8, ALL, ALL),
    "inspect": Room(8, ALL, ALL),
    "engine": Room(7, "msgspec ray", "fetches lines own_node runtime session"),
    "client": Room(
        7,
        "msgspec numpy prometheus_client psutil ray torch transformers xxhash",
        "accounts chunks cluster import_source listing pins pools scheduler sessions ship "
        "transfers",
    ),
    "directory": Room(
        6,
        "msgspec ray",
        "actor steward",
    ),
    "node": Room(
        5,
        "msgspec numpy psutil ray safetensors torch xxhash",
        "actor attached copying devices fetch host integrity keeper lanes launch lines peers read "
        "reports service disk.chunk_file disk.folder disk.reads disk.tier nixl.agent nixl.offers "
        "nixl.transport states.capturing states.file",
    ),
    "worker": Room(4, "msgspec torch", "export handover link staging"),
    "copy": Room(
        4,
        "cuda llvmlite msgspec numba numpy torch triton",
        "kernel rows cuda.backend cuda.driver cuda.kernel cuda.lane cuda.pages",
    ),
    "stream": Room(4, "msgspec numpy ray zmq", "publisher publishing readers"),
    "doctor": Room(4, "ray", "gather"),
    "memory": Room(
        3,
        "cuda msgspec numpy torch",
        "limits pages pool region words cuda.driver cuda.page_lock",
    ),
    "cluster": Room(3, "msgspec numpy psutil ray", "ask bequest deaths join logs processes relay"),
    "metrics": Room(3, "numpy prometheus_client ray xxhash", "discovery server"),
    "prompts": Room(3, "numpy transformers xxhash", "adapters"),
    "protocol": Room(2, "msgspec numpy", "wire"),
    "base": Room(1, "", "extras ownership parent settings threads"),
}
"""Each package above all those that it may import."""

IMPURE = {
    "asyncio", "concurrent", "ctypes", "cuda", "fcntl", "importlib", "llvmlite", "mmap",
    "multiprocessing", "numba", "os", "prometheus_client", "psutil", "queue", "random", "ray",
    "secrets", "select", "signal", "socket", "subprocess", "tempfile", "threading", "time", "torch",
    "triton", "vllm", "zmq",
}  # fmt: skip


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree. It must not be changed: all tests of a process share it."""
    return ast.parse(path.read_text())


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")


def room_of(name: str) -> Room | None:
    return HOUSE.get(name.split(".")[1]) if name.startswith("raykv.") else None


def is_shell(module: str) -> bool:
    room = room_of(module)
    return room is not None and room.has_shell(module.split(".", 2)[-1])
