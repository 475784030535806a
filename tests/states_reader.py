"""Somebody who waits for a file of hidden states that is not there yet."""

from __future__ import annotations

import threading

from raykv.base.errors import HiddenStatesError
from raykv.node.states.file import load_hidden_states


class DisappointedReader:
    """Loads in a thread of its own, and keeps what it is told in place of the states."""

    def __init__(self, path: str) -> None:
        self.errors: list[str] = []
        self._path = path
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            load_hidden_states(self._path, 30.0)
        except HiddenStatesError as error:
            self.errors.append(str(error))

    def waits_for(self, seconds: float) -> bool:
        """Whether it still waits after so long."""
        self._thread.join(seconds)
        return self._thread.is_alive()
