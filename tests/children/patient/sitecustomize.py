"""For the processes of an engine with several ranks: they wait for each other without yielding.

vLLM's ranks poll with `sched_yield`. Linux 6.18 can keep other processes from a core for minutes
that is yielded in a loop, NodeActors that were killed and kernel threads among them.
"""

import os
import sys
import time

PAUSE_S = 1e-4


def _pause() -> None:
    time.sleep(PAUSE_S)


os.sched_yield = _pause
print("patient: waits without yielding", file=sys.stderr)
