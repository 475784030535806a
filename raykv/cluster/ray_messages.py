"""What Ray tells a driver of errors elsewhere in the cluster.

A thread of Ray's prints it to standard output, whatever `log_to_driver` says, and so in the midst
of what a command prints as JSON.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("raykv.ray")

SENDER = "raylet"
"""Who these messages are said to come from."""


def log_errors() -> None:
    """From now on such messages go to the log `raykv.ray`; all else is printed as before."""
    try:
        from ray._private import worker

        plain = worker.print_to_stdstream
    except Exception as error:
        logger.debug("Ray's messages are left as they are: %s", error)
        return
    if getattr(plain, "logs_errors", False):
        return

    def print_or_log(data: dict[str, Any], *arguments: Any, **keywords: Any) -> None:
        if data.get("pid") == SENDER:
            for line in data.get("lines", ()):
                logger.info("Ray says: %s", line)
        else:
            plain(data, *arguments, **keywords)

    print_or_log.logs_errors = True  # type: ignore[attr-defined]
    worker.print_to_stdstream = print_or_log
