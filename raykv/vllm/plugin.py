"""vLLM's plugin entry point: makes the name `RayKVConnector` known in every vLLM process."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from raykv.base.parent import end_with_parent
from raykv.vllm.identity.media import is_ours, watch_prompts
from raykv.vllm.internals import is_registered, wrap_multi_connector

logger = logging.getLogger("raykv")


REPLICA_VARIABLE = "_RAYKV_REPLICA"
"""Environment variable with the process id of the Serve replica that has started vLLM."""


def register() -> None:
    """Register the connectors; vLLM calls this in each of its processes, some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if is_registered("RayKVConnector"):
        return
    replica = os.environ.get(REPLICA_VARIABLE)
    if replica is not None:
        # EngineCore looks after its workers; nobody but its replica looks after EngineCore.
        end_with_parent(int(replica))
    try:
        KVConnectorFactory.register_connector(
            "RayKVConnector", "raykv.vllm.connector", "RayKVConnector"
        )
        KVConnectorFactory.register_connector(
            "RayKVHiddenStatesConnector",
            "raykv.vllm.hidden_states",
            "RayKVHiddenStatesConnector",
        )
    except ValueError:
        logger.debug("RayKVConnector is registered already")
    wrap_multi_connector(recomputing)
    try:
        watch_prompts()
    except (AttributeError, ImportError) as error:
        # The engine logs it with the first request that it refuses.
        logger.debug("prompts are rendered in an unknown way: %s", error)


def recomputing(start: Callable[..., None]) -> Callable[..., None]:
    """A `MultiConnector` with ours among its own has requests computed whose loads fail.

    The policy of the whole counts, not that of its parts, and vLLM's default ends such requests.
    """

    @functools.wraps(start)
    def started(connector: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        if is_ours(vllm_config) and transfer.kv_load_failure_policy != "recompute":
            transfer.kv_load_failure_policy = "recompute"
            logger.warning(
                "kv_load_failure_policy of MultiConnector is set to recompute: with RayKV among "
                "its connectors, a load that fails must not end its request"
            )
        start(connector, vllm_config, *arguments, **named)

    return started
