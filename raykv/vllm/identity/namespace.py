"""The namespace: a digest of all that must be equal before two engines may share KV bytes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.ids import Namespace
from raykv.prompts.block_hashes import RANDOM
from raykv.vllm.identity.facts import FACTS
from raykv.vllm.identity.readers import Engine, short, trait_of_seed

_LONGEST_TRAIT = 64


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, offloading_config: Any, weights_version: str
) -> dict[str, Any]:
    """All facts of an engine by name, as JSON has them, without those that say nothing.

    Raises:
        SettingError: one can't be told: a setting is missing, or a file or vLLM is not as expected.
    """
    engine = Engine(vllm_config, kv_cache_config, offloading_config, weights_version)
    found = {}
    for fact in FACTS:
        try:
            value = fact.value(engine)
        except SettingError:
            raise
        except Exception as error:
            raise SettingError(
                f"RayKV can't tell this engine's KV from others', since it can't read {fact.name} "
                f"({fact.why}): {type(error).__name__}: {error}"
            ) from error
        if value is not None:
            found[fact.name] = value
    return found


def namespace_of(facts: dict[str, Any]) -> Namespace:
    """Digest of `facts`; equal facts give equal namespaces."""
    text = json.dumps(facts, sort_keys=True)
    return Namespace(hashlib.sha256(text.encode()).hexdigest()[:32])


def traits_of(facts: dict[str, Any]) -> dict[str, str]:
    """`facts` in short texts that can be compared and shown; all of them, so that a difference of
    two namespaces always has a name. Secrets, as a seed may be one, are digests.
    """
    traits = {name: short(value, _LONGEST_TRAIT) for name, value in facts.items()}
    traits["hash_seed"] = trait_of_seed(facts["hash_seed"], RANDOM)
    return traits
