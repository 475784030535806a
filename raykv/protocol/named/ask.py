"""An EngineCore and the scheduler actor: who else has chunks, and what this engine stores."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Key, NodeId
from raykv.protocol.columns import MAX_GROUPS, MAX_ROWS, Keys, Numbers, Source, SourceKind
from raykv.protocol.listing import Reason
from raykv.protocol.named.columns import Count, Named, Text, check_column, check_index

MOST_ASKED = 16_384
"""Keys of one question: of a prompt of 262,144 tokens, in chunks of 16."""

MOST_SOURCES = 2
"""Of one chunk, that an answer names: the second for when the first has lost it."""


class Ask(msgspec.Struct, frozen=True):
    """Which nodes have keys that an engine's places do not have?

    Args:
        version: of the protocol.
        engine_id: who asks.
        life: of the EngineCore.
        namespace: of the keys.
        places: nodes that the engine is at, which are not named in the answer.
        keys: of a prompt, from its head on.
        coming: keys that the engine has begun to store.
    """

    version: int
    engine_id: Named
    life: Count
    namespace: Named
    places: Annotated[list[Text], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    keys: Keys = Keys()
    coming: Keys = Keys()

    def __post_init__(self) -> None:
        check_column(self.keys, most=MOST_ASKED)
        check_column(self.coming, most=MOST_ASKED)


class AskAnswer(msgspec.Struct, frozen=True):
    """Answer to `Ask`; numbers of keys are those in the question.

    Args:
        life: of the scheduler actor.
        nodes: names of nodes.
        key_index: a row for each source of a key, the best one first.
        node_index: points into `nodes`.
        where: of each row, a `SourceKind`.
        coming: numbers of keys that another engine stores now.
        gone: numbers of keys that were somewhere, and `reasons` why they are not there any more.
        other: numbers of keys that only another namespace has.
    """

    life: int
    nodes: list[str] = []
    key_index: Numbers = Numbers()
    node_index: Numbers = Numbers()
    where: bytes = b""
    coming: Numbers = Numbers()
    gone: Numbers = Numbers()
    reasons: bytes = b""
    other: Numbers = Numbers()

    def __post_init__(self) -> None:
        num_rows = len(self.key_index)
        if num_rows > MAX_ROWS or not num_rows == len(self.node_index) == len(self.where):
            raise ValueError(f"columns of different lengths beside {num_rows} rows")
        check_index(self.node_index, self.nodes)
        if self.where and max(self.where) > SourceKind.DISK:
            raise ValueError(f"a chunk at {max(self.where)}")
        if len(self.gone) != len(self.reasons) or (
            self.reasons and max(self.reasons) > max(Reason)
        ):
            raise ValueError("reasons that nobody has")

    def sources(self, keys: Keys) -> dict[Key, list[Source]]:
        """Where each key of the question is, the best source first.

        Raises:
            ValueError: a number of a key that was not asked for.
        """
        asked = list(keys)
        found: dict[Key, list[Source]] = {}
        for at, node, where in zip(self.key_index, self.node_index, self.where, strict=True):
            if not 0 <= at < len(asked):
                raise ValueError(f"key {at} of {len(asked)}")
            source = Source(NodeId(self.nodes[node]), SourceKind(where))
            found.setdefault(Key(asked[at]), []).append(source)
        return found
