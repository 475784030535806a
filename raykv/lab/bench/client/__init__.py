"""`client`: what vLLM's own clients see of servers, with KV caches beside them and without.

`vllm bench serve` plays a trace with its arrival times (`timed_trace`), prefixes that come again
(`prefix_repetition`) and prompts of which no two are alike (`random`); vLLM's multi-turn benchmark,
which is in no package, plays conversations. The servers have little KV memory and start one after
the other: vLLM alone, with its native offloader, with LMCache, and `raykv serve`. On a CPU vLLM's
native offloader copies with `raykv.lab.bench.in_process`, since its own worker needs a GPU. The
order changes with each repeat, and each repeat has prompts of its own, the same for all servers.
"""

from raykv.lab.bench.client.measure import run

__all__ = ["run"]
