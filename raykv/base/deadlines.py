"""Times that modules share: how long something may take, how often to look, when to try again.

One constant stands for one kind of wait. A wait with a reason of its own is a constant of its
module, and three are settings, whose names end in `_deadline_s`. tests/unit/base/test_deadlines.py
finds waits without an end, and numbers without a name.
"""

from __future__ import annotations

# How long something may take

INSTANT_S = 0.002
"""A pause within a request: what comes meanwhile goes with the same message, or finds room."""

PROMPT_S = 1.0
"""For work of milliseconds that something else waits for: events, an order's floors, a step of an
engine that enters a namespace, a check of the doctor."""

STOP_S = 2.0
"""For each thread when its process ends, also after Ctrl-C. A running copy is given up before its
next run of bytes."""

SEND_S = 2.0
"""A peer that reads nothing for this long is stuck: its connection is closed, so that it does not
delay others."""

GRACE_S = 2.0
"""Beyond a deadline that the NodeActor keeps itself. After it a fetch counts as lost, and a worker
ends a NodeActor that has not confirmed that it gave up a copy: a late copy could write into
another request's blocks."""

PROBE_S = 3.0
"""For all nodes, or Ray's processes, to answer one question of a person: healthy ones need
milliseconds, new ones a second."""

ANSWER_S = 5.0
"""For one answer of an actor, of Ray's head node or of a socket's peer. Healthy ones need
milliseconds; Ray itself waits a minute for a dead GCS, and Prometheus gives up after 10 s."""

LEAVE_S = 5.0
"""For a process, a connection or an application to end when asked to; for processes, once more
after SIGKILL."""

CLIENT_S = 8.0
"""For one answer of an actor to a person or a program, who may have come during a restart. With
what comes before and after it, a command has said within 10 s who does not answer."""

PREDECESSOR_S = 10.0
"""How long a new NodeActor waits for its predecessor to release its socket's name and its pool
file: a killed process with much memory takes seconds to exit. If they are still held after that,
another NodeActor has them."""

JOIN_S = 30.0
"""For joining or leaving Ray, or for Ray to start a process: tenths of a second, but many seconds
if all cores of a host are busy or the GCS is away."""

READ_S = 30.0
"""For reading chunks or hidden states: 64 MiB from another node at 3 MB/s, or behind four fetches.
States are copied within milliseconds, unless many wait."""

STORE_DEADLINE_S = 30.0
"""A store that takes longer is given up; no request waits for it. Its copy may wait this long for
the GPU's earlier work: a long step takes seconds."""

TRANSFER_S = 60.0
"""For a page of chunks to come to a node."""

REPLICA_WAIT_S = 60.0
"""For a replica to take a request, where the arguments do not say otherwise: a new one needs 15 s
on a quiet machine, and balancers and clients in front give up after a minute or more."""

BULK_S = 600.0
"""For writing all that pools hold to disks, or reading it from files, by default: 200 GiB at 400
MB/s."""

# How often to look, or to report

BRIEF_S = 0.01
"""Between two looks, messages or pages if a step, a copy or a person waits for the next one and
others must come in between."""

LOOK_S = 0.1
"""Between two looks at what sends no event: another process, actors that begin or end, an order
that nodes carry out (they report every tenth of that, if there is news)."""

IDLE_LOOK_S = 0.25
"""The same if a look is expensive, or for a rare event: a thread that has died, a subscriber that
floods a socket, silent nodes."""

WAKE_S = 1.0
"""A thread that waits for work wakes up at least this often: to see whether it is to end, whether a
copy has ended (it does for certain, since every run of bytes is short), or what has expired."""

HEARTBEAT_S = 1.0
"""A NodeActor reports at least this often to the scheduler actor, which forgets it after ten missed
reports, and to engines that ask it; an engine reports as often to its NodeActor."""

SILENCE_S = 1.0
"""A command that has waited this long for actors names them."""

SELDOM_S = 5.0
"""Between two looks at what changes in minutes: room for a pool, nodes that Ray drains, expired
states, Prometheus' targets."""

# When to try again

RETRY_PAUSES_S = (0.1, 1.0)
"""First and longest pause if an attempt is cheap: a thread, a line to a NodeActor, a report. Ray
starts another actor within seconds, and until then nothing is found."""

AGAIN_S = 1.0
"""Before another attempt that depends on others: a thread when the system has too many, prefill
engines that Ray Serve restarts, a scheduler actor that has not answered a reader for long."""

SOURCE_PAUSES_S = (2.0, 30.0)
"""How long not to ask a source that did not answer, first and longest: asking in vain costs a
request its deadline, and Ray takes 12 to 64 s to notice that a node is gone."""
