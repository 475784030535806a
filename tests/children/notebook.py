"""Runs notebooks from their first cell to their last: `python tests/children/notebook.py PATH...`.

With `--serve` each is run as a reader does it: the server of its first cell is started, in the Ray
cluster at RAY_ADDRESS or in one of its own, and ended afterwards. With `--store` it is also kept
with its outputs; `make notebooks` does that.

Exit code 1, and the cell and its error on standard error, if one fails or prints warnings.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from PIL import Image

CELL_DEADLINE_S = 600
"""Engines start in one of them, on a machine that may be busy."""

START_DEADLINE_S = 600
STOP_DEADLINE_S = 60
COLOURS = 64
SERVER = os.environ.get("OPENAI_BASE_URL", "http://localhost:8000/v1").removesuffix("/v1")


@contextmanager
def server_of(notebook: Any) -> Iterator[None]:
    """Start the server that the first cell tells the reader to start, if any."""
    found = re.search(
        r"^\$ ((?:\w+=\w+ )*)(raykv serve .*)$", notebook.cells[0].source, re.MULTILINE
    )
    if found is None:
        yield
        return
    variables = dict(each.split("=") for each in found[1].split())
    _, *arguments = shlex.split(found[2])
    command = [str(Path(sys.executable).with_name("raykv")), *arguments]
    command += ["--port", SERVER.rpartition(":")[2]]
    log = Path("server.log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=output, stderr=output
        )
    try:
        _wait_for(process, log)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_DEADLINE_S)


def _wait_for(process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while True:
        try:
            urllib.request.urlopen(f"{SERVER}/health", timeout=5).close()
            return
        except OSError:
            ended = process.poll() is not None
            if ended or time.monotonic() > deadline:
                raise SystemExit(f"no server:\n{log.read_text(errors='replace')[-4000:]}") from None
            time.sleep(0.5)


def run(notebook: Any, manager: KernelManager) -> str:
    """Fill in a notebook's outputs; return what is wrong with it, if anything."""
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, km=manager)
    try:
        client.execute()
    except CellExecutionError as error:
        return str(error)
    finally:
        client.kc.stop_channels()
        del notebook.cells[0]
    return "".join(each["text"] for each in outputs(notebook) if each.get("name") == "stderr")


def outputs(notebook: Any) -> list[Any]:
    return [each for cell in notebook.cells for each in cell.get("outputs", ())]


def store(notebook: Any, path: Path) -> None:
    """Keep it as the tests want it: without times, with cells numbered from 1."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        cell.metadata = {}
        cell.execution_count = number
        for each in cell.outputs:
            if "execution_count" in each:
                each["execution_count"] = number
            if (image := each.get("data", {}).get("image/png")) is not None:
                each["data"]["image/png"] = _small(image)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)


def _small(image: str) -> str:
    """A PNG with a palette: plots of thousands of values would be hundreds of kilobytes."""
    made = io.BytesIO()
    whole = Image.open(io.BytesIO(base64.b64decode(image))).convert("RGB")
    whole.quantize(COLOURS).save(made, "png", optimize=True)
    return base64.b64encode(made.getvalue()).decode()


def show(path: Path, manager: KernelManager, *, is_stored: bool) -> bool:
    """Run a notebook and report on it; return whether it is right."""
    notebook = nbformat.read(path, as_version=4)
    if wrong := run(notebook, manager):
        print(f"{path}: {wrong}", file=sys.stderr)
        return False
    if is_stored:
        store(notebook, path)
    shown = outputs(notebook)
    images = sum("image/png" in each.get("data", {}) for each in shown)
    print(f"{path}: {len(shown)} outputs, {images} images", flush=True)
    return True


@contextmanager
def kernel() -> Iterator[KernelManager]:
    manager = KernelManager()
    manager.start_kernel()
    try:
        yield manager
    finally:
        manager.shutdown_kernel(now=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--store", action="store_true")
    given = parser.parse_args()
    if not given.serve:
        # One kernel for all, since most of its time goes into imports; what an earlier notebook has
        # left behind is forgotten.
        with kernel() as manager:
            return not all(show(path, manager, is_stored=given.store) for path in given.paths)
    for path in given.paths:
        with server_of(nbformat.read(path, as_version=4)), kernel() as manager:
            if not show(path, manager, is_stored=given.store):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
