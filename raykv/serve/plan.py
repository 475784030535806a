"""`raykv.plan`: sizes for a model, as vLLM would plan its KV cache; starts nothing.

vLLM decides when an engine starts how layers of several kinds share its blocks, and how large these
are. So its own code is asked: with the model's configuration, and a model that has shapes and no
memory. RayKV's settings then give what is stored of prompts.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raykv.base import errors, parsing
from raykv.base.settings import Settings, load_settings
from raykv.client import capacity
from raykv.engine.windows import state_ends
from raykv.memory import limits, room
from raykv.protocol.descriptions import ChunkGroup
from raykv.serve.models import shapes_of
from raykv.vllm.internals import names, offloading, planning

if TYPE_CHECKING:
    from raykv.engine.listed import EnginePlace
    from raykv.vllm.identity.placement import RankPlace

ENGINE_KEYS = (
    "block_size",
    "decode_context_parallel_size",
    "disable_hybrid_kv_cache_manager",
    "dtype",
    "enable_prefix_caching",
    "hf_overrides",
    "kv_cache_dtype",
    "mamba_block_size",
    "mamba_cache_dtype",
    "mamba_cache_mode",
    "mamba_ssm_cache_dtype",
    "max_model_len",
    "max_num_batched_tokens",
    "nnodes",
    "pipeline_parallel_size",
    "quantization",
    "revision",
    "tensor_parallel_size",
    "trust_remote_code",
)
"""Arguments of vLLM's engine that sizes follow from. Its ranks are spread evenly over `nnodes`,
whichever executor starts them.
"""

PROMPTS = (4_096, 32_768, 131_072)
"""Lengths of prompts that are usual."""


def plan(
    model: str,
    settings: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    prompts: Sequence[int] = PROMPTS,
) -> capacity.Plan:
    """What a model's KV takes, what pools hold of it, and whether settings fit.

    Takes seconds, since it imports vLLM. Sizes are those of vLLM's build that is installed here.

    Args:
        model: its name, see `raykv.serve.models.find_model`.
        settings: of RayKV, as in `kv_connector_extra_config`; `RAYKV_` variables count too.
        engine: arguments of vLLM's engine, those in `ENGINE_KEYS`.
        prompts: lengths in tokens of which to say what is stored, beside that of the longest.

    Raises:
        SettingError: a setting is wrong, there is no such model, it can't be read or made, or
            RayKV can't be used with it.
        VersionError: this vLLM is not supported.
    """
    extra = dict(settings or {})
    checked = load_settings(extra)
    arguments = dict(engine or {})
    wrong = sorted(set(arguments) - set(ENGINE_KEYS))
    if wrong:
        raise errors.SettingError(
            f"engine arguments {', '.join(wrong)}: sizes follow from {', '.join(ENGINE_KEYS)} only"
        )
    with shapes_of(model) as path:
        planned = _planned(path, extra, arguments)
    shape = planned.shape(model)
    lengths = {parsing.count("prompts", each) for each in prompts if each < shape.max_model_len}
    stored = [
        capacity.StoredPrompt(
            tokens=each,
            chunks=planned.stored(each, checked.window_share),
            default_chunks=planned.stored(each, 0.0),
        )
        for each in sorted({*lengths, shape.max_model_len})
    ]
    return capacity.make_plan(shape, stored, _wishes(checked), planned.note)


def _wishes(settings: Settings) -> capacity.PoolWishes:
    limit = limits.memory_limit()
    pool_bytes = settings.pool_bytes or room.default_pool_bytes(limit.free_bytes)
    in_memory, disk = True, None
    if settings.pool_path:
        path = Path(settings.pool_path)
        in_memory, disk = limits.is_in_memory(path), limits.disk_limit(path)
    needs = room.PoolNeeds(pool_bytes, in_memory=in_memory)
    return capacity.PoolWishes(
        pool_bytes,
        settings.staging_bytes if settings.kv_handover == "staged" else None,
        room.objection(needs, [limit], disk),
    )


class Planned:
    """What vLLM says of an engine that was not started.

    Args:
        vllm_config: of the engine.
        kv_cache: as its scheduler is told.
        stages: the KV cache of a rank of each pipeline stage.
        spec: RayKV's, made for it.
        places: where the engine's ranks would be.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache: Any,
        stages: Sequence[Any],
        spec: Any,
        places: Sequence[EnginePlace],
    ) -> None:
        self._config = vllm_config
        self._kv_cache, self._stages = kv_cache, stages
        self._spec, self._places = spec, places
        self._step_tokens: int = vllm_config.scheduler_config.max_num_batched_tokens
        self._kinds = self._tables().kinds
        self._groups = self._tables().groups

    def _tables(self) -> offloading.SchedulerTables:
        return planning.planned_tables(self._spec, self._config, self._kv_cache)

    def shape(self, name: str) -> capacity.KVShape:
        """Sizes of the model, which is called by that name."""
        model = self._config.model_config
        of_nodes: Counter[str] = Counter()
        for place in self._places:
            of_nodes[place.node_id] += max(place.slot_bytes.values(), default=self._spec.slot_bytes)
        return capacity.KVShape(
            model=name,
            dtype=self._spec.config.model.dtype,
            layers=model.model_arch_config.total_num_hidden_layers,
            max_model_len=model.max_model_len,
            slot_bytes=of_nodes.total(),
            node_bytes=max(of_nodes.values()),
            num_nodes=len(of_nodes),
            num_ranks=self._spec.config.parallel.world_size,
            num_parts=self._spec.num_parts,
            groups=tuple(self._group(each) for each in self._groups),
        )

    def _group(self, group: ChunkGroup) -> capacity.GroupShape:
        from raykv.vllm.kv_form import layer_specs

        layers = [
            each
            for stage in self._stages
            for each in layer_specs(stage.kv_cache_groups[group.group])
        ]
        of_a_block = sum(each.real_page_size_bytes for each in layers)
        blocks = self._spec.blocks_per_chunk * self._spec.num_parts // len(self._stages)
        kind, window_tokens = _kind(layers[0])
        return capacity.GroupShape(
            kind=kind,
            layers=len(layers),
            tokens_per_chunk=group.tokens,
            chunk_bytes=of_a_block * blocks,
            window_tokens=window_tokens,
            window_chunks=group.window,
        )

    @property
    def note(self) -> str:
        """What to know of recurrent states; empty: there are none."""
        modes = {
            number: getattr(kind, "mamba_cache_mode", "") for number, kind in self._kinds.items()
        }
        states = {each.tokens: modes[each.group] for each in self._groups if modes[each.group]}
        if not states:
            return ""
        if "none" in states.values():
            return (
                "vLLM keeps no states of this model where prompts may part, and RayKV can store "
                "none: give its engine enable_prefix_caching=True"
            )
        tokens, step = max(states), self._step_tokens
        return (
            f"a state takes a chunk of {tokens:,} tokens, and is stored where both a chunk and a "
            f"step of the engine end, every {max(tokens, step // tokens * tokens):,} tokens with "
            f"max_num_batched_tokens={step}: more of these store fewer states, and of prompts of "
            f"fewer than {tokens:,} tokens nothing is stored"
        )

    def stored(self, prompt: int, share: float) -> list[int]:
        """Chunks of each group that are stored of an unknown prompt of this length."""
        from raykv.vllm.windows import Windows

        tables = self._tables()
        Windows(tables, share)
        states = len(state_ends(self._groups, prompt, self._step_tokens, share))
        offered = planning.offered_chunks(tables, prompt)
        counts = [offered[each.group] for each in self._groups]
        return [states if count is None else count for count in counts]


def _planned(model: str, extra: dict[str, Any], arguments: dict[str, Any]) -> Planned:
    """Asks vLLM.

    Raises:
        SettingError: with its reason.
    """
    with _quiet():
        try:
            names.check_vllm_version(names.vllm_version())
            from raykv.vllm.identity import placement
            from raykv.vllm.spec import (
                RayKVOffloadingSpec,
                refuse_non_causal,
                told_to_specs,
                use_our_spec,
            )

            num_nodes = parsing.count("nnodes", arguments.pop("nnodes", 1))
            sizes = ("tensor_parallel_size", "pipeline_parallel_size")
            if any(arguments.get(each, 1) != 1 for each in sizes):
                # Else vLLM counts the GPUs of this host.
                arguments["distributed_executor_backend"] = "mp"
            config = planning.engine_config(
                {
                    **arguments,
                    "model": model,
                    "skip_tokenizer_init": True,
                    "kv_transfer_config": _transfer_config(extra),
                }
            )
            _refuse_others(model, config.model_config)
            # Where all ranks have the same KV, nodes keep it once only if they have one host.
            config.parallel_config.nnodes = num_nodes
            kv_cache, of_ranks = planning.planned_kv_cache(config)
            refuse_non_causal(kv_cache)
            own = config.kv_transfer_config.kv_connector_extra_config
            use_our_spec(own)
            with told_to_specs(own, config, kv_cache):
                spec = RayKVOffloadingSpec(offloading.offloading_config(config, kv_cache))
                ranks = []
                for rank, cache in enumerate(of_ranks):
                    config.parallel_config.rank = rank
                    of_rank = RayKVOffloadingSpec(offloading.offloading_config(config, cache))
                    ranks.append(placement.rank_of(of_rank))
            places = _places(ranks, num_nodes)
            placement.refuse_spread(places, spec, "RayKVConnector")
            stages = [of_ranks[each.rank] for each in {each.stage: each for each in ranks}.values()]
            return Planned(config, kv_cache, stages, spec, places)
        except errors.RayKVError:
            raise
        except ImportError as error:
            raise errors.SettingError(
                "vLLM is needed to read a model's configuration, and is not here: "
                f"{errors.first_line(error)}"
            ) from error
        except Exception as error:
            raise errors.SettingError(
                f"vLLM can't plan the KV cache of the model {model!r}: {_reason(error)}"
            ) from error


def _places(ranks: Sequence[RankPlace], num_nodes: int) -> list[EnginePlace]:
    """Where ranks are that are spread evenly over nodes.

    Raises:
        SettingError: they can't be.
    """
    from raykv.vllm.identity import placement

    if len(ranks) % num_nodes:
        raise errors.SettingError(
            f"{len(ranks)} ranks can't be spread evenly over nnodes={num_nodes} nodes"
        )
    for each in ranks:
        each.node_id = str(each.rank * num_nodes // len(ranks))
    return placement.places_of(ranks, len(ranks), "")


def _transfer_config(extra: dict[str, Any]) -> Any:
    """vLLM's, with RayKV as its connector, whether its plugin is installed or not."""
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="RayKVConnector",
        kv_connector_module_path="raykv.vllm.connector",
        kv_role="kv_both",
        kv_connector_extra_config=extra,
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """In which vLLM tells nothing on either stream, and sets no variable for good."""
    level, before = logging.root.manager.disable, dict(os.environ)
    try:
        logging.disable(logging.CRITICAL)
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        for name in os.environ.keys() - before:
            del os.environ[name]
        os.environ.update(before)


def _reason(error: Exception) -> str:
    """The part of vLLM's message that says something."""
    lines = [line.strip().removeprefix("Value error, ") for line in str(error).splitlines()]
    said = [line for line in lines if line and "validation error" not in line]
    if not said:
        return type(error).__name__
    # pydantic names the field on a line of its own, and repeats the input behind what it says.
    reason = said[0] if " " in said[0] else ": ".join(said[:2])
    return reason.partition(" [type=")[0]


def _refuse_others(model: str, config: Any) -> None:
    """Raise a SettingError that names a kind of model that RayKV is not tried with."""
    kind = ""
    if config.is_encoder_decoder:
        kind = "has an encoder and a decoder"
    elif config.runner_type == "pooling":
        kind = "generates no tokens"
    if kind:
        raise errors.SettingError(f"the model {model!r} {kind}: RayKV is not tried with such ones")


def _kind(spec: Any) -> tuple[str, int | None]:
    """What layers keep, in words, and how far they look back in tokens; None: all the way."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    match spec:
        case MambaSpec():
            return capacity.STATE, None
        case SlidingWindowSpec():
            return "sliding window", spec.sliding_window
        case ChunkedLocalAttentionSpec():
            return "chunked local attention", spec.attention_chunk_size
        case MLAAttentionSpec():
            return "latent attention", None
        case FullAttentionSpec():
            return "full attention", None
        case _:
            return type(spec).__name__, None
