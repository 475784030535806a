"""`routing`: the CPU time of a router's own thread to place a request.

*Remembered*: the next turn of a conversation whose earlier turns the router remembers, so that it
neither tokenizes nor asks the directory. The time covers everything from the body to the note of
the first token, with 64 replicas on 16 nodes that all have had the system prompt. The prompts are
as long as those of the published traces: the median is 7,000 tokens for conversations and 95,000
for agents.

*Asked*: a new prompt of 4096 tokens in blocks of 16, each a chunk, whose keys are made as well. The
tokens and the directory's answer are not counted: other threads and the scheduler actor make them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, alternate
from raykv.prompts.block_hashes import DEFAULT_SEED, PLAIN, HashScheme
from raykv.prompts.lookup import PromptScheme
from raykv.prompts.prompt_keys import PromptHasher, PromptKeys, PromptTokens
from raykv.protocol.descriptions import ChunkGroup
from raykv.serve.http.exchange import HttpRequest
from raykv.serve.router.directory import FoundPrompt
from raykv.serve.router.planner import PlacedRequest, RoutePlanner
from raykv.serve.router.rank import Candidate
from raykv.serve.router.rendering import Fallback
from raykv.serve.router.settings import RouteSettings
from raykv.serve.router.trail import read_trail

MOST_MS = 1.0
TOKENS, BLOCK, TURN = 4096, 16, 256
LENGTHS = (7_000, 30_000, 95_000, 250_000)
NUM_REPLICAS, NUM_NODES = 64, 16
SYSTEM_TOKENS = 4000
BYTES_PER_TOKEN = 4

NEW, NEXT = "new prompt", "next turn"
REMEMBERED, ASKED = "remembered", "directory asked"


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("routing")
    repeats = options.repeats_or(15)
    for length in LENGTHS[:1] if options.quick else LENGTHS:
        case = f"{NEXT}, {length:,} tokens, {NUM_REPLICAS} replicas"
        _measure(result, case, REMEMBERED, PlacedTurns(length).remembered_ms, repeats)
    tokens = 512 if options.quick else TOKENS
    case = f"{NEW}, {tokens} tokens, {NUM_REPLICAS} replicas"
    _measure(result, case, ASKED, PlacedTurns(tokens).asked_ms, repeats)
    return result


def _measure(
    result: Result, case: str, subject: str, measure: Callable[[], float], repeats: int
) -> None:
    result.rows += alternate(case, "ms of CPU", {subject: measure}, repeats)
    whole = result.row(case, subject).median
    result.at_most(MOST_MS, whole, f"{case}: at most {MOST_MS:g} ms")


class Answering:
    """Stands in for the tokenizer and the directory; `asked` counts questions."""

    def __init__(self) -> None:
        scheme = PromptScheme(HashScheme("sha256", DEFAULT_SEED, BLOCK), (ChunkGroup(0, BLOCK),))
        self.hasher: PromptHasher | None = PromptHasher(scheme)
        self.tokens: list[int] = []
        self.asked = 0

    async def render(self, request: HttpRequest) -> list[PromptTokens] | Fallback:
        """See `raykv.serve.router.planner.RoutePlanner`."""
        return [PromptTokens(self.tokens, PLAIN)]

    async def find(self, prompts: Sequence[PromptKeys]) -> list[FoundPrompt] | None:
        """See `raykv.serve.router.planner.Finder`."""
        self.asked += 1
        on_nodes = {f"n{n}": n * BLOCK for n in range(NUM_NODES)}
        return [FoundPrompt(on_nodes, NUM_NODES * BLOCK) for _ in prompts]


class PlacedTurns:
    """A planner that has sent a system prompt to every replica, and then conversations."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._random = Random(length)
        self._replicas = [
            Candidate(f"r{n}", f"n{n % NUM_NODES}", n % 7) for n in range(NUM_REPLICAS)
        ]
        self._answers = Answering()
        self._planner = RoutePlanner(self._answers.render, self._answers, RouteSettings())
        self._planner.keep([each.name for each in self._replicas])
        self._system = self._text(SYSTEM_TOKENS)
        for each in self._replicas:
            self._send(PlacedRequest(read_trail(self._body(""))), each)

    def remembered_ms(self) -> float:
        """Place the next turn of another conversation."""
        talk = self._text(self._length - SYSTEM_TOKENS - TURN)
        first = PlacedRequest(read_trail(self._body(talk)))
        self._send(first, self._random.choice(self._replicas))
        taken = self._place_ms(self._body(talk + self._text(TURN)))
        assert not self._answers.asked, self._length
        return taken

    def asked_ms(self) -> float:
        """Place a prompt that the router has never seen."""
        self._answers.tokens = prompt(self._random.getrandbits(30), self._length)
        body = json.dumps({"model": "m", "prompt": self._text(self._length)}).encode()
        return self._place_ms(body)

    def _place_ms(self, body: bytes) -> float:
        request = HttpRequest("POST", "/v1/completions", b"", [], body)
        began = time.thread_time()
        placed = _at_once(self._planner.place(request))
        assert isinstance(placed, PlacedRequest), placed
        best = self._planner.choose(placed, self._replicas)[0].name
        self._planner.went(placed, next(each for each in self._replicas if each.name == best))
        self._planner.began(placed)
        return (time.thread_time() - began) * 1e3

    def _send(self, request: PlacedRequest, replica: Candidate) -> None:
        self._planner.went(request, replica)
        self._planner.began(request)

    def _text(self, tokens: int) -> str:
        return self._random.randbytes(max(0, tokens) * BYTES_PER_TOKEN // 2).hex()

    def _body(self, talk: str) -> bytes:
        messages = [{"role": "system", "content": self._system}, {"role": "user", "content": talk}]
        return json.dumps({"model": "m", "messages": messages, "stream": True}).encode()


def _at_once(running: Coroutine[Any, Any, PlacedRequest | Fallback]) -> PlacedRequest | Fallback:
    """Run a coroutine that never waits."""
    try:
        running.send(None)
    except StopIteration as done:
        found: PlacedRequest | Fallback = done.value
        return found
    raise AssertionError("it waits")
