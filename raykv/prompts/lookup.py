"""Which chunks of a prompt are where: its keys as an engine of the namespace would make them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import lcm

from raykv.base.errors import ClusterError, NotFoundError, SettingError
from raykv.base.ids import Key, family_of
from raykv.prompts import block_hashes, prefixes
from raykv.protocol import columns, reader, status
from raykv.protocol.descriptions import ChunkGroup, parse_groups


@dataclass(frozen=True)
class PromptScheme:
    """How the engines of a namespace cut prompts into chunks, and what they call those.

    `states` are the KV groups with recurrent states.
    """

    hashing: block_hashes.HashScheme
    groups: tuple[ChunkGroup, ...]
    states: frozenset[int] = frozenset()

    def chunks(
        self, tokens: Sequence[int], traits: block_hashes.PromptTraits = block_hashes.PLAIN
    ) -> dict[ChunkGroup, list[Key]]:
        """Keys of a prompt's full chunks, by KV group."""
        hashes = block_hashes.block_hashes(tokens, self.hashing, traits)
        size = self.hashing.tokens_per_hash
        return {
            group: block_hashes.chunk_keys(hashes, group.tokens // size, group.group)
            for group in self.groups
        }

    def most_loaded(self, num_tokens: int) -> int:
        """How many of a prompt's first tokens an engine looks up.

        It computes the last one. A state is there at the end of a chunk only, so that the one
        behind the last token is of no use.
        """
        return max(0, num_tokens - 1) if self.states else num_tokens

    def ends(self, num_tokens: int) -> set[int]:
        """Where a prefix is to end that this prompt can be loaded from, and longer ones."""
        step = lcm(*(group.tokens for group in self.groups))
        return {end // step * step for end in (num_tokens, self.most_loaded(num_tokens))}


def scheme_of(space: status.NamespaceStatus, seeds: Sequence[str] = ()) -> PromptScheme:
    """What the engines of a namespace have said of themselves.

    Args:
        space: the namespace.
        seeds: of block hashes, besides vLLM's default; of the engines' only a digest is known.

    Raises:
        ClusterError: no engine of the namespace has been seen, or it has said too little.
        SettingError: none of the seeds is theirs, or it is random.
    """
    traits = space.traits
    try:
        groups = tuple(parse_groups(traits["chunks"]))
        size = int(traits["tokens_per_hash"])
        algorithm, digest = traits["hash_algorithm"], traits["hash_seed"]
        if size < 1 or any(group.tokens % size for group in groups):
            raise ValueError(f"chunks {groups} of blocks of {size}")
        states = frozenset(map(int, traits.get("state_groups", "").split()))
    except (KeyError, ValueError) as error:
        raise ClusterError(
            f"how namespace {space.namespace[:12]} cuts and hashes prompts is not known: no engine "
            "of it has been attached since the scheduler actor began; start one"
        ) from error
    if digest == block_hashes.RANDOM:
        raise SettingError(
            f"the engines of namespace {space.namespace[:12]} hash with {algorithm} and a random "
            "seed, so no other process can name a prompt's chunks: start them with "
            "PYTHONHASHSEED=0, or with --prefix-caching-hash-algo sha256"
        )
    for seed in (block_hashes.DEFAULT_SEED, *seeds):
        if block_hashes.seed_digest(seed) == digest:
            return PromptScheme(block_hashes.HashScheme(algorithm, seed, size), groups, states)
    raise SettingError(
        f"the engines of namespace {space.namespace[:12]} hash with a seed that is not known here: "
        "set PYTHONHASHSEED to what they have"
    )


def choose_namespace(
    spaces: Sequence[status.NamespaceStatus], model: str | None, beginning: str | None
) -> status.NamespaceStatus:
    """The one namespace of a model, or the one whose name begins so; with neither, the only one
    there is. One without engines, whose weights nobody has any more, counts where there is no other
    with some; and one that only lies on disks where there is none in a pool either.

    Raises:
        NotFoundError: there is none.
        ClusterError: there are several.
    """
    found = [
        space
        for space in _families(spaces)
        if space.namespace.startswith(beginning or "")
        and (model is None or _is_called(space.model, model))
    ]
    if len(found) > 1:
        found = [space for space in found if space.chunks or space.engines] or found
        found = [space for space in found if space.engines] or found
    if len(found) == 1:
        return found[0]
    wanted = f"of model {model!r}" if model else f"that begins with {beginning!r}"
    if not model and not beginning:
        wanted = "in the cache"
    known = ", ".join(f"{s.namespace[:12]} ({s.model or 'model unknown'})" for s in spaces)
    what = "no namespace" if not found else f"{len(found)} namespaces"
    hint = "name one with namespace=" if found else "start an engine of it first"
    raise (ClusterError if found else NotFoundError)(
        f"there is {what} {wanted}: {hint}; there are {known or 'none'}"
    )


def _families(spaces: Sequence[status.NamespaceStatus]) -> list[status.NamespaceStatus]:
    """The namespaces; those of parts of an engine are joined to that of the whole."""
    found = [space for space in spaces if space.namespace == family_of(space.namespace)]
    known = {space.namespace for space in found}
    for each in spaces:
        family = family_of(each.namespace)
        if family not in known:
            known.add(family)
            found.append(
                status.NamespaceStatus(
                    family, each.model, each.chunks, each.num_bytes, each.engines, each.traits
                )
            )
    return found


def _is_called(known: str, model: str) -> bool:
    """Whether a model's name or path is meant by `model`, which may be its last part."""
    return model in (known, known.rstrip("/").rpartition("/")[2])


def look_up(
    space: status.NamespaceStatus,
    scheme: PromptScheme,
    tokens: Sequence[int],
    traits: block_hashes.PromptTraits,
    sources_of: Callable[[Sequence[bytes]], Sequence[Collection[columns.Source]]],
) -> reader.PromptLookup:
    """Where the chunks of a prompt are.

    Args:
        space: the namespace, and `scheme` its engines' way.
        scheme: see there.
        tokens: of the prompt.
        traits: what separates it from others with the same tokens.
        sources_of: given keys, returns which pools and disks have each.
    """
    keys = scheme.chunks(tokens, traits)
    flat = [key for group in scheme.groups for key in keys[group]]
    sources = dict(zip(flat, sources_of(flat), strict=True))
    everywhere = sorted({each.node_id for some in sources.values() for each in some})
    most = scheme.most_loaded(len(tokens))
    asked = {group: keys[group][: most // group.tokens] for group in scheme.groups}
    found = [_prefix(node, asked, sources) for node in everywhere]
    cached_tokens = _loadable(asked, lambda key: bool(sources[key]))
    needed = {
        key
        for end in {cached_tokens, *scheme.ends(len(tokens))}
        for group in scheme.groups
        for key in prefixes.needed_chunks(group, keys[group], end)
    }
    chunks = [
        reader.PromptChunk(
            key=key,
            group=group.group,
            first_token=number * group.tokens,
            end_token=(number + 1) * group.tokens,
            nodes=sorted(each.node_id for each in sources[key] if not each.is_disk),
            disks=sorted(each.node_id for each in sources[key] if each.is_disk),
            is_needed=key in needed,
        )
        for group in scheme.groups
        for number, key in enumerate(keys[group])
    ]
    return reader.PromptLookup(
        namespace=space.namespace,
        model=space.model,
        prompt_tokens=len(tokens),
        cached_tokens=cached_tokens,
        nodes=sorted(
            found,
            key=lambda each: (-each.tokens, -each.tokens_with_disk, -each.chunks, each.node_id),
        ),
        chunks=chunks,
        disk_tokens=_tokens_on_disk(chunks, scheme.groups, cached_tokens),
    )


def _prefix(
    node: str,
    keys: Mapping[ChunkGroup, Sequence[Key]],
    sources: Mapping[Key, Collection[columns.Source]],
) -> reader.NodePrefix:
    pool, disk = columns.Source(node), columns.Source(node, columns.SourceKind.DISK)
    return reader.NodePrefix(
        node_id=node,
        tokens=_loadable(keys, lambda key: pool in sources[key]),
        chunks=sum(pool in some for some in sources.values()),
        disk_chunks=sum(disk in some for some in sources.values()),
        tokens_with_disk=_loadable(keys, lambda key: pool in sources[key] or disk in sources[key]),
    )


def _tokens_on_disk(
    chunks: Sequence[reader.PromptChunk], groups: Sequence[ChunkGroup], cached_tokens: int
) -> int:
    """How many of the first tokens need a chunk that is on a disk and in no pool."""
    tokens: set[int] = set()
    for group in groups:
        of_group = [chunk for chunk in chunks if chunk.group == group.group]
        for chunk in prefixes.needed_chunks(group, of_group, cached_tokens):
            if chunk.disks and not chunk.nodes:
                tokens.update(range(chunk.first_token, chunk.end_token))
    return len(tokens)


def _loadable(keys: Mapping[ChunkGroup, Sequence[Key]], is_there: Callable[[Key], bool]) -> int:
    there = {group.group: [is_there(key) for key in keys[group]] for group in keys}
    return prefixes.loadable_tokens(list(keys), there)
