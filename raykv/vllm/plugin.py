"""vLLM's plugin entry point: makes the name `RayKVConnector` known in every vLLM process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from raykv.base.parent import end_with_parent
from raykv.vllm.identity.media import is_ours, watch_prompts
from raykv.vllm.insight.sources import watch_front_ends
from raykv.vllm.internals import engine, names
from raykv.vllm.internals.arguments import refuse_arguments, wrap_arguments

logger = logging.getLogger("raykv")


REPLICA_VARIABLE = "_RAYKV_REPLICA"
"""Environment variable with the process id of the Serve replica that has started vLLM."""


CONNECTORS = {
    "RayKVConnector": "raykv.vllm.connector",
    "RayKVHiddenStatesConnector": "raykv.vllm.hidden_states",
}
"""Classes, and the modules that they are in."""


def __getattr__(name: str) -> Any:
    """A connector's class, which vLLM gets from here when it is first used.

    Raises:
        AttributeError: it is no connector.
        VersionError: RayKV does not know this vLLM, or it has no module that a connector needs.
    """
    if name not in CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    names.check_vllm_version(names.vllm_version())
    with names.known_vllm():
        return getattr(import_module(CONNECTORS[name]), name)


def register() -> None:
    """Register the connectors; vLLM calls this in each of its processes, some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        for name in CONNECTORS:
            KVConnectorFactory.register_connector(name, __name__, name)
    except ValueError:
        # They are registered already.
        return
    replica = os.environ.get(REPLICA_VARIABLE)
    if replica is not None:
        # EngineCore looks after its workers; nobody but its replica looks after EngineCore.
        end_with_parent(int(replica))
    multi = partial(engine.wrap_multi_connector, recomputing)
    for hook in (partial(wrap_arguments, refusing), multi, watch_front_ends, watch_prompts):
        try:
            hook()
        except (AttributeError, ImportError) as error:
            # An engine with RayKV does without, or refuses such a vLLM; others may use it.
            logger.debug("this vLLM is unknown: %s", error)


@engine.around
def recomputing(
    start: Callable[..., None], connector: Any, vllm_config: Any, *arguments: Any, **named: Any
) -> None:
    """A `MultiConnector` with ours among its own has requests computed whose loads fail.

    The policy of the whole counts, not that of its parts, and vLLM's default ends such requests.
    """
    transfer = vllm_config.kv_transfer_config
    if is_ours(vllm_config) and transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.warning(
            "kv_load_failure_policy of MultiConnector is set to recompute: with RayKV among "
            "its connectors, a load that fails must not end its request"
        )
    start(connector, vllm_config, *arguments, **named)


@engine.around
def refusing(finish: Callable[[Any], None], vllm_config: Any) -> None:
    """A configuration of an engine with RayKV is not finished that it can't be used with.

    It is refused here and not by the connectors alone: vLLM may put another one in their place.
    """
    if is_ours(vllm_config):
        refuse_arguments(vllm_config)
    finish(vllm_config)
