"""Runs notebooks from their first cell to their last: `python tests/children/notebook.py PATH...`.

One kernel for all of them, since most of its time goes into imports; what an earlier one has left
behind is forgotten. Exit code 1, and the cell and its error on standard error, if one fails.
"""

from __future__ import annotations

import sys

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CELL_DEADLINE_S = 240
"""Engines start in one of them, on a machine that may be busy."""


def run(paths: list[str], manager: KernelManager) -> int:
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        client = NotebookClient(notebook, timeout=CELL_DEADLINE_S, km=manager)
        try:
            client.execute()
        except CellExecutionError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return 1
        finally:
            client.kc.stop_channels()
        shown = [each for cell in notebook.cells for each in cell.get("outputs", ())]
        images = sum("image/png" in each.get("data", {}) for each in shown)
        print(f"{path}: {len(shown)} outputs, {images} images", flush=True)
    return 0


if __name__ == "__main__":
    kernel = KernelManager()
    kernel.start_kernel()
    try:
        code = run(sys.argv[1:], kernel)
    finally:
        kernel.shutdown_kernel(now=True)
    sys.exit(code)
