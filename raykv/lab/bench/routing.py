"""`routing`: what it costs a request to be placed, without its tokenising and the question.

A prompt of 4096 tokens in blocks of 16, each of which is a chunk, for 8 replicas on 4 nodes: its
keys are made, what was sent where lately is looked up, the replicas are put in order, and it is
remembered where the prompt goes. A new prompt is hashed whole; the next turn of a conversation has
256 tokens more than the last one. Beside it what it takes to tokenise the prompt, which is done on
a thread of its own, and to answer the question in the scheduler actor's process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any

from raykv.directory.answers.prefixes import MAX_NODES_OF_A_KEY, prefix_page
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Verdict, alternate
from raykv.lab.bench.routing_simulation import run_simulation
from raykv.prompts.block_hashes import DEFAULT_SEED, PLAIN, HashScheme
from raykv.prompts.lookup import PromptScheme
from raykv.prompts.prompt_keys import PromptHasher, PromptTokens
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.groups import ChunkGroup
from raykv.protocol.reader import PrefixQuery
from raykv.serve.router.rank import Candidate, PromptPlace, RecentPrompts, Weights, rank

MOST_MS = 1.0
TOKENS, BLOCK, TURN = 4096, 16, 256
NUM_NODES = 4
MOST_KEYS = 1024

NEW, NEXT = "new prompt", "next turn"
HASH, WHOLE = "keys", "keys and decision"


def run(options: Options) -> Result:
    """See the module's docstring, or with `cluster` that of `routing_simulation`."""
    if options.cluster is not None:
        return run_simulation(options, options.cluster, "routers in front of a simulated cluster")
    tokens = 512 if options.quick else TOKENS
    repeats = options.repeats_or(15)
    result = Result("routing", BENCHMARKS["routing"].summary)
    for name, is_new in ((NEW, True), (NEXT, False)):
        case = f"{name}, {tokens} tokens"
        result.rows += alternate(case, "ms", _subjects(tokens, is_new=is_new), repeats)
        whole = result.row(case, WHOLE).median
        result.verdicts.append(Verdict(f"{case}: at most {MOST_MS:g} ms", whole, MOST_MS))
    beside: dict[str, Callable[[], float]] = {
        "the answer for 32 nodes": lambda: _answer_ms(tokens // BLOCK)
    }
    if not options.quick:
        beside["tokenising (SmolLM2)"] = _tokeniser(tokens)
    result.rows += alternate(f"beside it, {tokens} tokens", "ms", beside, repeats)
    return result


def _subjects(tokens: int, *, is_new: bool) -> dict[str, Callable[[], float]]:
    """Each measures a prompt that was not measured before."""
    seeds = count(1)
    group = ChunkGroup(0, BLOCK)
    scheme = PromptScheme(HashScheme("sha256", DEFAULT_SEED, BLOCK), (group,))
    recent = RecentPrompts(30.0)
    replicas = [Candidate(f"r{n}", f"n{n % NUM_NODES}", n % 3) for n in range(2 * NUM_NODES)]
    on_nodes = {f"n{n}": n * BLOCK for n in range(NUM_NODES)}

    def measure(decides: bool) -> float:
        hasher = PromptHasher(scheme)
        whole = prompt(next(seeds), tokens)
        if not is_new:
            before = PromptTokens(whole[: tokens - TURN], PLAIN)
            recent.remember("r0", hasher.keys(before, MOST_KEYS).keys[group], 0.0)
        began = time.perf_counter()
        keys = hasher.keys(PromptTokens(whole, PLAIN), MOST_KEYS).keys[group]
        if decides:
            held = recent.num_held(keys, 1.0)
            place = PromptPlace(
                tokens, on_nodes, tokens // 2, {name: n * BLOCK for name, n in held.items()}
            )
            best = rank(replicas, [place], Weights())[0]
            recent.remember(best.name, keys, 1.0)
        return (time.perf_counter() - began) * 1e3

    return {HASH: lambda: measure(False), WHOLE: lambda: measure(True)}


def _answer_ms(num_keys: int) -> float:
    """Milliseconds to make an answer out of replicas: a prompt that all nodes have."""
    nodes = [f"{n:056d}" for n in range(MAX_NODES_OF_A_KEY)]
    query = PrefixQuery(PROTOCOL_VERSION, "space", f"0:{BLOCK}", [b"k"] * num_keys, [num_keys])
    key_index = [key for key in range(num_keys) for _ in nodes]
    node_index = [node for _ in range(num_keys) for node in range(len(nodes))]
    began = time.perf_counter()
    prefix_page(query, nodes, key_index, node_index)
    return (time.perf_counter() - began) * 1e3


def _tokeniser(tokens: int) -> Callable[[], float]:
    from transformers import AutoTokenizer

    from raykv.serve.models import smollm2

    tokenizer: Any = AutoTokenizer.from_pretrained(str(smollm2()))
    seeds = count(1)

    def measure() -> float:
        words = tokenizer.decode(prompt(next(seeds), tokens))
        messages = [{"role": "user", "content": words}]
        began = time.perf_counter()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokenizer.encode(text, add_special_tokens=False)
        return (time.perf_counter() - began) * 1e3

    return measure
