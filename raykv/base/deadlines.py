"""Waits that are not settings and that modules share, each with its reason.

A wait that only one module uses is a constant of that module. Together with the settings whose
names end in `_deadline_s`, these are all the times that anything in RayKV
waits for anything: tests/unit/base/test_deadlines.py finds waits without one, and numbers without
a name.
"""

from __future__ import annotations

GCS_S = 5.0
"""For an actor's address from Ray's head node, which takes milliseconds; Ray itself waits a minute
for a dead GCS.
"""

NODE_SEND_S = 2.0
"""A worker or engine that does not read for this long is stuck; its connection is closed so that
it does not hold up others' copies.
"""

WAKE_S = 1.0
"""A thread that waits for work wakes up at least this often: to see whether it is to end, whether a
copy has ended (it does for certain, since every run of bytes is short), or what has expired.
"""

NODE_STOP_S = 2.0
"""For each thread at the end; a copy that runs is given up before its next run of bytes."""

NODE_ROOM_LOOK_S = 5.0
"""Between two looks of a NodeActor without a pool, or of one that memory is short for, at whether
there is room now."""

STATES_READ_S = 30.0
"""For the states of a request that has just ended: they are copied within milliseconds, unless
many wait."""

FETCH_GRACE_S = 2.0
"""Above the deadline that the NodeActor keeps, before it counts as lost."""

SOURCE_PAUSES_S = (2.0, 30.0)
"""How long a source that did not answer is left alone, first and longest: asking in vain costs a
request its fetch deadline, and Ray takes 12 to 64 s to notice that a node is gone.
"""

LOOK_S = 0.1
"""Between two looks at what nobody tells: another process, actors that begin or end, an order that
nodes carry out (they report every tenth of that, if there is news).
"""

TRANSFER_S = 60.0
"""For a page of chunks to come to a node."""

CLIENT_S = 8.0
"""For one answer of an actor to a person or a program, who may have come during a restart. With
what comes before and after it, a command has said within 10 s who does not answer."""

SILENCE_S = 1.0
"""A command that waits for actors says for which ones after so long."""

READER_PAUSE_S = 0.2
"""Between two questions of a reader when nothing is new, or nobody answers."""

REPLICA_WAIT_S = 60.0
"""For a replica to take a request, where the arguments do not say otherwise: a new one needs 15 s
on a quiet machine, and balancers and clients in front give up after a minute or more."""
