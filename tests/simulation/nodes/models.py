"""What engines serve: models with several KV groups, and the prompts that come to them.

Two engines of one model have the same ranks and the same KV groups. Weights of a model may change:
then its chunks are in another namespace, under the same keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from raykv.base.ids import SLOT_ALIGNMENT, Blocks, Key, Namespace, NodeId
from raykv.engine.listed import EnginePlace
from raykv.engine.remote import ChunkSize
from tests.fixtures.keys import named_key
from tests.simulation.nodes.content import BLOCKS

WHOLE = Blocks(0, BLOCKS)
NARROW = Blocks(BLOCKS // 2, BLOCKS - BLOCKS // 2)
"""What is left of a chunk in which a window begins."""

PART = "-"
"""Between the ranks that are the name of a part."""

SHARED_CHUNKS = 1
"""At the head of a prompt, that another document has, too."""


@dataclass(frozen=True)
class KVGroup:
    """`window`: so many chunks the end of a prefix needs; None: all."""

    pages: int
    window: int | None = None


@dataclass(frozen=True)
class Model:
    """`ranks`: at each place of an engine, how many."""

    name: str
    ranks: tuple[int, ...]
    groups: tuple[KVGroup, ...]

    @property
    def num_ranks(self) -> int:
        return sum(self.ranks)

    def namespace(self, weights: int) -> Namespace:
        return Namespace(f"{self.name}-{weights}")

    def places(self, node_ids: Sequence[NodeId], life: int) -> list[EnginePlace]:
        """Of an engine of that life."""
        if len(self.ranks) == 1:
            return [EnginePlace(node_ids[0], life=life)]
        ends = list(accumulate(self.ranks))
        ranks = [range(end - count, end) for end, count in zip(ends, self.ranks, strict=True)]
        return [
            EnginePlace(node_id, PART.join(map(str, each)), life, tuple(each))
            for node_id, each in zip(node_ids, ranks, strict=True)
        ]

    def slot_bytes(self) -> dict[int, int]:
        """By KV group."""
        return {group: each.pages * SLOT_ALIGNMENT for group, each in enumerate(self.groups)}

    def sizes(self) -> dict[int, ChunkSize]:
        """As an engine knows them that fetches."""
        return {
            group: ChunkSize(each.pages * SLOT_ALIGNMENT, BLOCKS, each.window)
            for group, each in enumerate(self.groups)
        }

    def keys(self, group: int, prompt: Prompt) -> list[Key]:
        """Of a prompt, from its head on."""
        return [named_key(name, group) for name in prompt.chunks]

    def needed(self, group: int, end: int) -> range:
        """The chunks of a KV group that a prefix of so many chunks needs."""
        window = self.groups[group].window
        return range(0 if window is None else max(0, end - window), end)


MODELS = (
    Model("small", (1,), (KVGroup(1),)),
    Model("windowed", (2,), (KVGroup(1), KVGroup(2, window=2))),
    Model("mixed", (3,), (KVGroup(1), KVGroup(1, window=1), KVGroup(2))),
    Model("wide", (2, 1), (KVGroup(1), KVGroup(1, window=2))),
)
"""The last one's engines have two places."""


@dataclass(frozen=True)
class Prompt:
    """The beginning of a document."""

    document: int
    chunks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.chunks)

    @staticmethod
    def of(document: int, length: int) -> Prompt:
        """So many chunks of a document; the first ones are another document's, too."""
        return Prompt(document, tuple(_names(document, length)))


def _names(document: int, length: int) -> Iterator[str]:
    for at in range(length):
        yield f"{document // 2}s{at}" if at < SHARED_CHUNKS else f"{document}d{at}"
