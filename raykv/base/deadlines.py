"""Times that modules share: how long something may take, how often one looks, when one tries again.

One constant stands for one reason. A wait with a reason of its own is a constant of its module, and
three are settings, whose names end in `_deadline_s`. tests/unit/base/test_deadlines.py finds waits
without an end, and numbers without a name.
"""

from __future__ import annotations

# How long something may take

INSTANT_S = 0.002
"""A pause that a request may meet: what comes meanwhile goes with the same message, or finds room.
"""

PROMPT_S = 1.0
"""For what takes milliseconds while something else waits for it: events, a report, a step of a
start that is late, what a doctor looks at."""

STOP_S = 2.0
"""For each thread at an end, also where somebody has pressed Ctrl-C. A copy that runs is given up
before its next run of bytes."""

SEND_S = 2.0
"""Who does not read for this long is stuck; the connection is closed, so that it does not hold up
others."""

GRACE_S = 2.0
"""Above a deadline that the NodeActor keeps by itself. Then a fetch counts as lost; and a NodeActor
that has not confirmed that it gave up a copy is ended, since a late copy could write into another
request's blocks."""

PROBE_S = 3.0
"""For all nodes, or Ray's processes, to answer one question of a person: those that are well need
milliseconds, those that were just made a second."""

ANSWER_S = 5.0
"""For one answer of an actor, of Ray's head node or of a socket's other end, to a thread that no
request waits for: milliseconds when all is well. Ray itself waits a minute for a dead GCS, and
Prometheus gives up after 10 s."""

LEAVE_S = 5.0
"""For a process, a connection or an application to end that was asked to. Processes have it once
more after SIGKILL."""

CLIENT_S = 8.0
"""For one answer of an actor to a person or a program, who may have come during a restart. With
what comes before and after it, a command has said within 10 s who does not answer."""

PREDECESSOR_S = 10.0
"""How long a new NodeActor waits for its predecessor to release its socket's name and the file of
its pool: a killed process with much memory takes seconds to exit. What is still held after that,
another NodeActor has."""

JOIN_S = 30.0
"""For joining or leaving Ray, or for Ray to start a process: tenths of a second, or many where all
cores of a host are busy or its GCS is away."""

READ_S = 30.0
"""For chunks or states that are read: 64 MiB come from another node at 3 MB/s, or behind four
fetches; states are copied within milliseconds, unless many wait."""

STORE_DEADLINE_S = 30.0
"""A store that takes longer is given up; no request waits for it. Its copy waits as long for a GPU
to finish what it was given before: a long step may take seconds."""

TRANSFER_S = 60.0
"""For a page of chunks to come to a node."""

REPLICA_WAIT_S = 60.0
"""For a replica to take a request, where the arguments do not say otherwise: a new one needs 15 s
on a quiet machine, and balancers and clients in front give up after a minute or more."""

BULK_S = 600.0
"""For all that pools hold to be written to disks, or to be read from files, unless a caller says
more: 200 GiB at 400 MB/s."""

# How often one looks, or says something

BRIEF_S = 0.01
"""Between two looks, messages or pages where a step, a copy or a person waits for the next one, and
others come in between."""

LOOK_S = 0.1
"""Between two looks at what nobody tells: another process, actors that begin or end, an order that
nodes carry out (they report every tenth of that, if there is news)."""

IDLE_LOOK_S = 0.25
"""The same where a look costs something, or is for what hardly ever happens: a thread that has
died, a subscriber that floods a socket, nodes that are silent."""

WAKE_S = 1.0
"""A thread that waits for work wakes up at least this often: to see whether it is to end, whether a
copy has ended (it does for certain, since every run of bytes is short), or what has expired."""

HEARTBEAT_S = 1.0
"""Who is well says so at least this often: a NodeActor to the scheduler actor, which forgets it
after ten missed ones, and to engines that ask it; an engine to its NodeActor."""

SILENCE_S = 1.0
"""A command that waits for actors says for which ones after so long."""

SELDOM_S = 5.0
"""Between two looks at what changes in minutes: room for a pool, nodes that Ray drains, states that
have been kept long enough, Prometheus' targets."""

# When one tries again

RETRY_PAUSES_S = (0.1, 1.0)
"""First and longest, where a try costs little: threads, lines to a NodeActor, reports. Ray starts
another actor within seconds, and until then nothing is found."""

AGAIN_S = 1.0
"""Before what something else must make possible: a thread where the system has too many, prefill
engines that Ray Serve starts again, a scheduler actor that a reader has lost patience with."""

SOURCE_PAUSES_S = (2.0, 30.0)
"""How long a source that did not answer is left alone, first and longest: asking in vain costs a
request its deadline, and Ray takes 12 to 64 s to notice that a node is gone."""
