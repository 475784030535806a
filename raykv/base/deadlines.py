"""Waits that are not settings, each with its reason.

Together with the settings whose names end in `_deadline_s`, and `cancel_grace_s`, these are all the
times that anything in RayKV waits for anything: tests/unit/base/test_deadlines.py finds waits
without one, and numbers that should be here.
"""

from __future__ import annotations

# Threads that have failed

THREAD_PAUSES_S = (0.1, 1.0)
"""Before a failed thread is started again, first and longest: whatever it looks after waits."""

THREAD_WELL_S = 60.0
"""A thread that has run for so long has recovered from its last failure."""

THREAD_REVIVE_S = 1.0
"""Between two attempts to start a thread that the system refused: another one must end first."""

# The worker's line to its NodeActor

LINK_CONNECT_S = 5.0
"""For connecting and attaching: mapping a KV cache takes milliseconds, prefaulting may delay it."""

LINK_PAUSES_S = (0.05, 2.0)
"""Between attempts to reach the NodeActor, first and longest: Ray needs a second to start another
one; an attempt costs microseconds."""

LINK_LOOK_S = 1.0
"""The line's thread wakes up at least this often."""

LINK_WAIT_LOOK_S = 0.5
"""How often an engine that waits for jobs checks that the line's thread still lives."""

STAGED_LOOK_S = 0.002
"""While a load that the engine waits for has no room in the staging memory; its own deadline ends
it."""

LINK_EXIT_S = 2.0
"""For the exit of a NodeActor that was killed, which takes milliseconds on a quiet machine; then it
is enough that none of its threads runs any more, where only these could write."""

LINK_EXIT_LOOK_S = 0.5
"""Between two checks of that."""

LINK_HALT_S = 1.0
"""For every core to have been in the kernel once, which takes some ticks of its clock."""

LINK_LAST_S = 60.0
"""For the exit of a killed NodeActor that a GPU may still copy for: a driver takes seconds to
unlock hundreds of GiB. After that the engine ends, since its memory is not its own any more.
"""

GCS_S = 5.0
"""For an actor's address from Ray's head node, which takes milliseconds; Ray itself waits a minute
for a dead GCS.
"""

LINK_CLOSE_S = 5.0
"""For the line's thread when the engine ends; it gives up all waits at once."""

# The NodeActor

NODE_HELLO_S = 10.0
"""From a connection's start to the end of its attach message: strangers may say nothing. The
message is sent at once; a frozen engine may attach anew when it wakes up."""

NODE_TURN_AWAY_S = 0.5
"""The same for a worker that cannot be served: the thread that tells it so holds up all others."""

NODE_SEND_S = 2.0
"""A worker or engine that does not read for this long is stuck; its connection is closed so that
it does not hold up others' copies.
"""

NODE_LOOK_S = 1.0
"""How often expired stores are looked for, the end of a copy is checked (it ends for certain, since
every run of bytes is short), and a copy thread without a job looks for one.
"""

NODE_GIVE_WAY_S = 0.02
"""How long a store within host memory lets loads go first before it copies the next 4 MiB: loads
take milliseconds, and an endless stream of them leaves stores 200 MB/s.
"""

NODE_DEATHS_LOOK_S = 1.0
"""How often the thread that waits for engines to die checks whether it should end."""

NODE_STOP_S = 2.0
"""For each thread at the end; a copy that runs is given up before its next run of bytes."""

NODE_ACCEPT_PAUSE_S = 0.2
"""After a connection could not be accepted: too many files are open."""

NODE_LOCK_LOOK_S = 0.2
"""How often a piece of the pool that is to be page-locked is checked until it is prefaulted. A
piece of 1 GiB takes about half a second.
"""

NODE_BIND_S = 10.0
"""How long a new NodeActor waits for its predecessor to release the socket's name: a killed process
with much memory takes seconds to exit.
"""

NODE_BIND_LOOK_S = 0.1
"""Between two attempts."""

NODE_DRAIN_LOOK_S = 5.0
"""Between two looks at whether Ray drains the node."""

POOL_FILE_S = 10.0
"""The same for the file of its pool. If it is still held after that, another NodeActor has it."""

POOL_FILE_LOOK_S = 0.1
"""Between two attempts."""

CUDA_COMPUTE_S = 30.0
"""How long a copy waits for the GPU to finish what it was given before: a long step may take
seconds. As long as a store may take; a load is taken back earlier by its own deadline."""

CUDA_HANG_S = 10.0
"""A batch of at most 32 MiB takes milliseconds: a device that has not carried it out by then hangs.
The batch cannot be taken back, so the process ends.
"""

CUDA_SPIN_S = 0.0002
"""How long a copy thread polls a device without a pause: a chunk takes a tenth of a millisecond,
and so do falling asleep and waking up.
"""

CUDA_POLL_S = 0.0001
"""Between two polls of a device after that; in threads that `raykv.base.threads.sleep_precisely`
was called in, else Linux adds 50 µs to every sleep, also to one of no time."""

CUDA_LANE_LOOK_S = 0.01
"""How often a copy that waits for another one of its direction checks whether it was cancelled."""

SLOT_LOOK_S = 0.05
"""How often is looked whether all chunks have their checksums, at the end of a NodeActor."""

LINE_SILENCE_S = 1.0
"""An EngineCore that asks what is new at a node hears so often that the node is there."""

LINE_PAUSE_S = 0.002
"""Between two answers with rows: what changes meanwhile goes with one message."""

POOL_FILE_ORDERS_S = 30.0
"""How long chunks of a pool file wait for the operators' orders, which say what of them is void."""

NODE_HEARTBEAT_S = 1.0
"""The scheduler actor forgets a node after ten missed ones."""

NODE_REPORT_S = 2.0
"""For one report, which is answered in milliseconds. A report to a scheduler actor that has just
died may wait in vain; the next one finds its successor."""

NODE_FLOORS_S = 1.0
"""For the disk tier to keep what an order clears, which takes milliseconds; a disk that hangs is
asked again before each report."""

NODE_REPORT_PAUSES_S = (0.2, 1.0)
"""After reports without an answer, first and longest: a new scheduler actor knows nothing until
its nodes have reported."""

NODE_ROOM_GRACE_S = 3.0
"""How long a new NodeActor waits for its predecessor's memory to be freed."""

NODE_ROOM_GRACE_LOOK_S = 0.5
"""Between two looks at it."""

NODE_ROOM_LOOK_S = 5.0
"""Between two looks of a NodeActor without a pool, or of one that memory is short for, at whether
there is room now."""

# Disk tier

DISK_BATCH_S = 0.5
"""How long chunks wait for others to share a file with: fewer and larger files."""

DISK_GIVE_WAY_S = 1.0
"""How long a file waits for copies to end before it is written anyway."""

DISK_GIVE_WAY_LOOK_S = 0.02
"""Between two checks of that."""

DISK_CLAIM_LOOK_S = 0.01
"""Before a folder of the disk tier that is held is tried once more: a process that only looks holds
it for less.
"""

DISK_RETRY_S = 15.0
"""After a failed write, or while there is no room, before the next attempt."""

OFFER_S = 10.0
"""For another node to take an offer's bytes, which no store may overwrite meanwhile; it may have
died."""

OFFER_LOOK_S = 1.0
"""Between two looks for offers that are too old."""

NIXL_AGAIN_S = 60.0
"""A node that could not be read through NIXL, or has none, is read through Ray for so long."""

NIXL_LOOK_S = 0.0005
"""Between two looks at transfers of NIXL, which wakes nobody up."""

DISK_READ_S = 10.0
"""For a read on behalf of another node, which has a deadline of its own: a network's disk may hang,
and must not hold up reads of the pool for ever."""

HOST_DISK_S = 1.0
"""For a look at what lies under `disk_path`, for `raykv doctor`: a network's disk may hang."""

DISK_LOOK_S = 1.0
"""The threads of a disk tier wake up at least this often."""

DISK_NEXT_LOOK_S = 0.05
"""Between two looks for chunks that go next, each of which walks over some thousands of them."""

# Hidden states

STATES_ROOM_S = 60.0
"""For room in memory, while others are written to a disk: a request's blocks stay taken as long,
which keeps the engine from computing faster than can be written. The engine gives up earlier."""

STATES_LOOK_S = 0.5
"""Threads that wait for states wake up at least this often."""

STATES_EXPIRY_LOOK_S = 5.0
"""Between two looks for states that have been kept long enough."""

STATES_READ_S = 30.0
"""For the states of a request that has just ended: they are copied within milliseconds, unless
many wait."""

STATES_LOAD_S = 600.0
"""For a file of states to be written, for a reader that does not say otherwise: the promise is as
old as the request, which may be computed for minutes."""

STATES_FIND_PAUSE_S = 0.05
"""Between two rounds of asking which node has a request's states."""

# Fetches

FETCH_MOST_S = 3600.0
"""Upper bound, whatever a request says; as much as a setting allows."""

FETCH_GRACE_S = 2.0
"""Above the deadline that the NodeActor keeps, before it counts as lost."""

FETCH_LOOK_S = 0.2
"""Between two looks for requests that are overdue."""

SOURCE_PAUSES_S = (2.0, 30.0)
"""How long a source that did not answer is left alone, first and longest: asking in vain costs a
request its fetch deadline, and Ray takes 12 to 64 s to notice that a node is gone.
"""

FETCHER_PAUSES_S = (0.1, 2.0)
"""The same for an engine's own NodeActor: Ray starts another one within seconds."""

# The engine, its places and the scheduler actor

PLACE_CONNECT_S = 5.0
"""For a NodeActor to let an engine in, which it does in milliseconds."""

PLACE_PAUSES_S = (0.05, 1.0)
"""After a line to a NodeActor that broke, first and longest: Ray starts another one within seconds,
and until then nothing is found."""

PLACE_LOST_S = 4.0
"""A NodeActor that answers nothing for so long is connected to anew: it answers each second."""

PLACE_LOOK_S = 0.25
"""How often the line's thread looks whether something is due."""

PLACE_SEND_S = 1.0
"""For a message to a NodeActor to make progress."""

TELL_PAUSE_S = 0.01
"""Between two messages of an engine to its node: news of some steps travel together."""

TELL_S = 1.0
"""At least so often an engine says how it is."""

SCHEDULER_PAUSES_S = (0.1, 2.0)
"""After a question without an answer, first and longest: a new scheduler actor is there within
seconds, and only new requests wait for it.
"""

ENTER_S = 1.0
"""Until what is known of a namespace has come, after the call that has changed an engine's weights;
else requests find it little by little."""

ATTACH_LOOK_S = 0.005
"""Between two looks of an engine that waits for what its node has."""

ASK_PAUSE_S = 0.002
"""Between two questions under load: those of some requests travel together."""

ASK_LOOK_S = 1.0
"""How often the thread that asks looks whether something is due."""

REPEAT_PAUSE_S = 0.02
"""Between two questions about chunks that are being stored elsewhere."""

CLEAR_LOOK_S = 0.02
"""Between two looks whether what an engine has cleared is ordered: the store of Ray's head takes
milliseconds."""

SESSION_STOP_S = 2.0
"""For the session's thread at the engine's end; it may be waiting for an answer of Ray."""

LEAVE_S = 5.0
"""For leaving the Ray cluster at the engine's end: Ray itself waits for a dead GCS for a minute."""

ATTACH_SAY_S = 4.0
"""An engine that waits longer for the actors says so; new ones take 2 s."""

LEAST_ATTACH_S = 1.0
"""What is left of the attach deadline for a step when the steps before it have used it up."""

# Clusters, actors, and who looks at them

DOCTOR_S = 3.0
"""For each round of questions to all actors, which are asked at once; the second one goes to those
that have answered the first."""

ASK_RAY_S = 4.0
"""For what a person or a program asks Ray itself."""

DOCTOR_REACH_S = 1.0
"""For one port."""

DOCTOR_TAKE_S = 1.0
"""For taking an answer that has arrived."""

RAY_START_S = 90.0
"""For `ray start`, which takes 6 to 10 s on a quiet machine."""

RAY_CONNECT_S = 5.0
"""For reaching a cluster's port at all. Joining takes 0.1 to 0.6 s when all is well; without the
cluster's authentication token Ray itself gives up after about 20 s."""

RAY_LEAVE_S = 30.0
"""For leaving a cluster whose raylet is dead, in order to join it again: tenths of a second, unless
its GCS is away as well."""

RAY_STOP_S = 3.0
"""For processes to end by themselves, then once more after SIGKILL."""

RAY_LOOK_S = 0.1
"""Between two checks for another process, a new node, or actors that are ending."""

REPLACE_PAUSE_S = 0.5
"""For Ray to forget the name of an actor that was ended."""

INHERIT_S = 60.0
"""For what an earlier life has left: without it, what was cleared could come back. Longer than a
busy head node takes; where it is gone, nobody could make the actor.
"""

RECONCILE_PAUSES_S = (2.0, 60.0)
"""Between two searches for nodes that lack their NodeActor, first, and longest while Ray's head
node does not answer: each search occupies a thread.
"""

UP_MEMORY_S = 30.0
"""For a node to say how much memory it has free: Ray starts a process there first."""

UP_S = 300.0
"""For the pools of all nodes to be there, prefaulted: 2 GB/s, so 256 GiB take two minutes."""

KEEP_S = 600.0
"""For all that the pools hold to be on the disks: 200 GiB at 400 MB/s, unless the caller says more.
"""

KEEP_GRACE_S = 5.0
"""For the NodeActors' answers after that."""

IMPORT_S = 600.0
"""For all chunks of an import, unless a caller says more."""

IMPORT_NODE_S = 3.0
"""For a node to report, if none has: those that were just made do so within a second."""

IMPORT_START_S = 60.0
"""For the process that reads the files: Ray starts it, and it reads their headers."""

UP_LOOK_S = 0.2
"""Between two looks at how far they are."""

UP_ANSWER_S = 2.0
"""For the answers of one look."""

TRANSFER_S = 60.0
"""For a page of chunks to come to a node."""

TRANSFER_LOOK_S = 0.1
"""Between two looks whether an order is carried out: nodes report every tenth of that, if there is
news."""

PIN_HEARD_S = 2.0
"""For all nodes to have the keys of a pin, which they ask for once they have heard of it."""

CLIENT_S = 8.0
"""For one answer of an actor to a person or a program, who may have come during a restart. With
what comes before and after it, a command has said within 10 s who does not answer."""

CLIENT_JOIN_S = 30.0
"""For a person or a program to join the cluster: tenths of a second, or many where all cores of the
host are busy. They are told after `CLIENT_S`; a part that hangs is found within `CLIENT_PROBE_S`.
"""

CLIENT_PROBE_S = 3.0
"""For the first word of Ray's gcs_server or raylet to them, a millisecond: their threads for the
network say it, however busy they are."""

CLIENT_LEAVE_S = 2.0
"""For leaving it again; also for somebody who has pressed Ctrl-C because it hangs."""

SILENCE_S = 1.0
"""A command that waits for actors says for which ones after so long."""

LISTING_PAUSE_S = 0.005
"""Between two pages of a listing, each of which holds the lock of a pool for milliseconds: copies
come in between."""

CHUNK_READ_S = 30.0
"""For chunks of at most 64 MiB that a person looks at: from another node at 3 MB/s, or behind four
fetches that run there."""

RECORD_PAUSE_S = 0.5
"""Between two looks of a recorder at the cluster: events and requests are kept for far longer."""

RECORDER_STOP_S = 15.0
"""For a recorder's thread, which may be waiting for one answer."""

READER_S = 5.0
"""For one page of events or of a snapshot."""

READER_PATIENCE_S = 30.0
"""How long a reader of events asks a restarting scheduler actor again."""

READER_PAUSE_S = 0.2
"""Between two questions of a reader when nothing is new, or nobody answers."""

METRICS_CLIENT_S = 5.0
"""For a scraper to send its request, and to take each part of the answer."""

METRICS_LOOK_S = 0.5
"""Between two looks of the metrics' server at whether it should end."""

METRICS_COLLECT_S = 5.0
"""For the scheduler actor's own metrics, which wait their turn among its calls. Prometheus gives up
after 10 s."""

METRICS_TARGETS_S = 2.0
"""Between two looks at which nodes there are, for the file that Prometheus reads."""
PUBLISH_CUT_S = 0.25
"""Between two looks at how much each subscriber has sent: about 50 MB in between, from one that
floods the sockets, and 1 ms for a process with some hundred open files."""

PUBLISH_LOOK_S = 0.1
"""The publisher's sockets are looked at so often when nothing is published: for questions for what
was missed, and for the end."""

PUBLISH_ASK_S = 1.0
"""For what nodes know of chunks' insides, which takes milliseconds: events wait meanwhile."""

PUBLISH_PUT_S = 1.0
"""For a batch to find room before the sockets; the log waits meanwhile."""

PUBLISH_BIND_PAUSE_S = 0.5
"""Between two tries to bind the publisher's sockets: an earlier life may still hold them."""

PUBLISH_FAILED_PAUSE_S = 1.0
"""Pause after a reader's patience with the scheduler actor has run out."""

PUBLISH_BIND_S = 5.0
"""For a new publisher to say whether it could bind its sockets, to a person."""

SERVE_GRACE_S = 20.0
"""For `vllm serve` to end after SIGINT: it may be writing out its last answers."""

SERVE_LEFTOVER_S = 5.0
"""For processes that a dead server has left behind, before and after SIGKILL."""

SERVE_LOOK_S = 0.2
"""How often `raykv serve` looks whether it was asked to stop."""

PREFILL_PROBE_S = 5.0
"""For prefill engines that have failed to answer a prompt of one token: busy ones may have a few
long prompts before it. Meanwhile the decode engines compute all prompts."""

PREFILL_PROBE_PAUSE_S = 1.0
"""Between two such tries: Ray Serve takes 10 s or more to start another engine."""

ENGINE_LOOK_S = 0.1
"""How often a Serve replica looks whether its engine lives: a dead one takes requests as long."""

# Routing of requests to replicas

ROUTE_RENDER_S = 0.25
"""For a prompt's tokens, 1 to 3 ms for 1,000 of them: with more prompts waiting than that, to send
one anywhere is better than to let it wait."""

ROUTE_ANSWER_S = 0.05
"""For the directory to say where a prompt is, which takes 1 to 3 ms: less than what it saves."""

ROUTE_PAUSES_S = (0.5, 30.0)
"""A directory that did not answer is not asked for so long, first and longest: each question in
vain costs a request its deadline."""

ROUTE_LEARN_S = 5.0
"""For what the namespaces are; nobody waits for it."""

ROUTE_LEARN_PAUSES_S = (1.0, 60.0)
"""Between two looks at what the namespaces are: until the replicas' is known, and after that, since
an update of the application may give them another one."""

ASGI_END_S = 5.0
"""For vLLM's application to give a request up whose client has left: it tells the engine, no more.
"""

BODY_S = 60.0
"""For a client to send its request, at most 64 MiB: 10 Mbit/s."""

REPLICA_WAIT_S = 60.0
"""For a replica to take a request, where the arguments do not say otherwise: a new one needs 15 s
on a quiet machine, and balancers and clients in front give up after a minute or more."""

REPLICA_RETRY_PAUSE_S = 0.05
"""Before a request whose replica has died is given to another one: the router learns of it
first."""

REPLICA_RETRY_AFTER_S = 5
"""How long a client is asked to wait if no replica could take its request."""

REPLICA_METRICS_S = 5.0
"""For all replicas to write down their metrics. Prometheus gives up after 10 s."""

METRICS_FRESH_S = 1.0
"""How long an ingress shows them before it asks again: whoever asks it costs replicas no more."""

# Commands that end what they have started

COMMAND_END_S = 15.0
"""For a command that is asked to end: it ends its engines and its Ray in order, which takes a few
seconds; after that it is killed, and its warden does the rest. Container managers kill after 30 s.
"""

WARDEN_LOOK_S = 1.0
"""How often a warden notes what the command has started: it costs a millisecond or two, and an
engine lives longer than that before it changes its title.
"""

WARDEN_SWEEP_S = 10.0
"""For killing what is left, in rounds: killed processes are gone within milliseconds."""

WARDEN_DOWN_S = 60.0
"""For `raykv down` in a cluster that stays: joining it takes a second or two, and it has deadlines
of its own."""
