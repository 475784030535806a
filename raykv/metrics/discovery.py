"""The file that tells Prometheus what to scrape, as Ray writes one: `file_sd_configs` reads it.

One thread in the scheduler actor asks which nodes there are, and writes when that has changed. A
reader sees the old file or the new one, never a part.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from raykv.base import deadlines, errors, ownership, threads

logger = logging.getLogger("raykv.metrics")

FILE_NAME = "raykv_metrics_sd.json"


class TargetsFile:
    """Keeps a file up to date for as long as the process lives; nothing waits for it.

    Args:
        path: of the file; its folder must be there.
        cluster: the cluster's address, a label of all targets.
        targets: all targets, in order; called in the thread, and may fail.
    """

    def __init__(self, path: Path, cluster: str, targets: Callable[[], list[str]]) -> None:
        self._path = path
        self._cluster = cluster
        self._targets = targets
        self._complained = False

    def start(self) -> None:
        threads.start_thread("raykv-targets", self._run, threads.OnFailure.RUN_AGAIN)

    def _run(self) -> None:
        while True:
            self.look()
            time.sleep(deadlines.SELDOM_S)

    def look(self) -> None:
        """Write the file if it does not have the targets; the next round retries a failure."""
        try:
            group = {"labels": {"job": "raykv", "cluster": self._cluster}}
            text = json.dumps([{**group, "targets": self._targets()}])
            if not self._has(text):
                self._write(text)
        except Exception as error:
            if not self._complained:
                self._complained = True
                why = errors.first_line(error)
                logger.warning("%s can't be kept up to date (said once): %s", self._path, why)
            return
        self._complained = False

    def _has(self, text: str) -> bool:
        try:
            return self._path.read_bytes() == text.encode()
        except OSError:
            return False

    def _write(self, text: str) -> None:
        """Replace the file.

        Raises:
            OSError: the file can't be written.
        """
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            ownership.write_own(draft, text.encode(), 0o644)
            draft.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise


def default_path() -> Path | None:
    """A file next to Ray's `prom_metrics_service_discovery.json`, or None if Ray has no folder."""
    folder = session_folder()
    return None if folder is None else folder / FILE_NAME


def session_folder() -> Path | None:
    """The folder of the Ray session that this process is a driver of, or None."""
    from ray._private import worker

    node = worker._global_node
    folder = None if node is None else node.get_session_dir_path()
    return None if folder is None else Path(folder)
