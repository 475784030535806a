"""Every wait of the product has an end, and every such number has a name and a reason.

A call that waits says how long, or `# bounded: why` stands in or above it. Benchmarks, chaos runs
and the demonstration with its models are left out: a person watches them.
"""

from __future__ import annotations

import ast
import re
from collections import Counter

import pytest

from raykv.base import deadlines
from tests import house
from tests.house import ROOT, module_name, tree_of

LEFT_OUT = ("raykv/lab/", "raykv/serve/models.py")
WATCHED = [path for path in house.SOURCES if not str(path.relative_to(ROOT)).startswith(LEFT_OUT)]
SOURCES = {module_name(path): path.read_text() for path in WATCHED}

TIMEOUT_AT = {
    **dict.fromkeys(("wait", "join", "result", "exception", "sleep", "within"), 0),
    **dict.fromkeys(("acquire", "communicate", "wait_procs", "wait_for", "wait_readable"), 1),
    "create_connection": 1,
    "queue.get": 1,
    "queue.put": 2,
    "select": 3,
}
"""Which argument of a call is its time-out, if it is no keyword."""

BY_KEYWORD = {"ray.get", "ray.wait", "subprocess.run", "subprocess.check_output"}
UNLIMITED = {
    *("accept", "recv", "recvmsg", "recv_into", "recv_fds", "sendall", "sendmsg", "send_fds"),
    *("flock", "get_actor", "list_named_actors"),
    *("ray.init", "ray.kill", "ray.nodes", "ray.shutdown"),
}
"""Methods that take no time-out."""

WAITS = {each.rpartition(".")[2] for each in (*TIMEOUT_AT, *BY_KEYWORD, *UNLIMITED)}

NO_WAIT = re.compile(r"LOCK_NB|MSG_DONTWAIT")
BOUNDED = re.compile(r"# bounded: \w")
NO_TIMES = {0, 1000}
"""Don't wait, and milliseconds in a second."""


def limit(call: ast.Call) -> ast.expr | bool:
    """What says how long a call may wait; True: it does not wait, False: nothing says it."""
    for keyword in call.keywords:
        if keyword.arg in ("timeout", "timeout_s", "deadline_s"):
            return keyword.value
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)
    if name not in WAITS:
        return True
    whole = ast.unparse(call.func)
    owner = whole.rpartition(".")[0]
    if whole in BY_KEYWORD:
        return False
    if {name, whole} & UNLIMITED and owner:
        return NO_WAIT.search(ast.unparse(call)) is not None
    joins_texts = name == "join" and owner.lstrip("bf")[:1] in ("'", '"')
    is_function = not owner and name not in ("within", "wait_readable")
    if joins_texts or is_function or whole == "logger.exception":
        return True
    if name in ("get", "put") and "queue" in owner.lower():
        name = f"queue.{name}"
    position = TIMEOUT_AT.get(name, -1)
    return position < 0 or (len(call.args) > position and call.args[position])


def numbers_in(expression: ast.expr) -> list[float]:
    """Numbers that somebody chose, in an expression."""
    values = (node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    return [each for each in values if type(each) in (int, float) and each not in NO_TIMES]  # type: ignore[misc]


def findings(source: str, tree: ast.Module) -> list[str]:
    """Waits without an end, and numbers to wait for without a name, one sentence each."""
    found, lines = [], ["", *source.splitlines()]
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or (told := limit(call)) is True:
            continue
        if any(map(BOUNDED.search, lines[call.lineno - 1 : (call.end_lineno or 0) + 1])):
            continue
        if told is False:
            found.append(f"line {call.lineno}: `{ast.unparse(call)}` waits without a deadline")
        elif numbers := numbers_in(told):
            found.append(f"line {call.lineno}: {numbers} has no name: `{ast.unparse(call)}`")
    return found


def test_every_wait_has_a_named_end() -> None:
    found = {str(path): findings(path.read_text(), tree_of(path)) for path in WATCHED}
    assert not {path: sentences for path, sentences in found.items() if sentences}


NAMED_TIME = re.compile(r"^(#.*\n)?^(\w+_S)(?:: float)? = .*\d.*\n(\"\"\")?", re.MULTILINE)


def without_reason(source: str) -> list[str]:
    """Named times with neither a comment above nor a docstring below."""
    return [name for above, name, below in NAMED_TIME.findall(source) if not above and not below]


def test_every_named_time_has_a_reason_and_is_used() -> None:
    uses = Counter(re.findall(r"\b\w+_S\b", "\n".join(SOURCES.values())))
    num_named = 0
    for module, source in SOURCES.items():
        assert not without_reason(source), module
        for _, name, _ in NAMED_TIME.findall(source):
            num_named += 1
            assert uses[name] > 1, f"nobody uses {module}.{name}"
    assert num_named > 30


@pytest.mark.parametrize("line", ["LOOK_S = 0.1", "LOOK_S: float = 0.1", "LOOK_S = 2 * PAUSE_S"])
def test_named_time_without_a_reason_is_found(line: str) -> None:
    assert without_reason(f"import time\n\n{line}\n") == ["LOOK_S"]
    assert not without_reason(f"# Between two looks.\n{line}\n")
    assert not without_reason(f'{line}\n"""Between two looks."""\n')


def test_only_shared_times_are_among_the_shared() -> None:
    for _, name, _ in NAMED_TIME.findall(SOURCES[deadlines.__name__]):
        users = [
            module for module, text in SOURCES.items() if re.search(rf"deadlines\.{name}\b", text)
        ]
        assert len(users) > 1, f"{name} belongs to {users}"


def test_end_of_a_process_takes_seconds() -> None:
    assert 0 < deadlines.STOP_S <= deadlines.LEAVE_S <= 5


@pytest.mark.parametrize(
    "source",
    """event.wait() | thread.join() | self._thread.join() | future.result() | ray.get(ref)
    ray.wait([ref]) | ray.init() | self._queue.get() | self._queue.put(1) | lock.acquire()
    sock.recv(1) | sock.sendall(b'') | listener.accept() | process.wait() | process.communicate()
    subprocess.run(['true']) | select.select([fd], [], []) | wire.wait_readable([fd])
    socket.create_connection(('host', 1)) | psutil.wait_procs(all) | fcntl.flock(fd, LOCK_EX)
    time.sleep(0.1) | event.wait(5) | event.wait(max(1.0, left)) | thread.join(timeout=2)
    ray.get(ref, timeout=3.0) | cluster.find(timeout_s=3.0) | select.select([fd], [], [], 0.5)
    answering.join(5) | sock.recv_fds(1, 1)
    event.wait()  # bounded""".replace("\n", "|").split("|"),
)
def test_wait_without_a_named_end_is_found(source: str) -> None:
    assert len(findings(source.strip(), ast.parse(source.strip()))) == 1


@pytest.mark.parametrize(
    "source",
    """event.wait(LOOK_S) | event.wait(timeout=LOOK_S) | thread.join(STOP_S) | counts.get(key)
    ray.get(ref, timeout=LOOK_S) | queue.get(timeout=LOOK_S) | ', '.join(names) | mode.join(names)
    time.sleep(LOOK_S) | select.select([fd], [], [], LOOK_S) | fcntl.flock(fd, LOCK_NB)
    sock.recv(1, MSG_DONTWAIT) | event.wait()  # bounded: why""".replace("\n", " | ").split(" | "),
)
def test_wait_with_a_named_end_is_fine(source: str) -> None:
    assert not findings(source.strip(), ast.parse(source.strip()))
