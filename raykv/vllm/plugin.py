"""vLLM's plugin entry point: makes the name `RayKVConnector` known in every vLLM process."""

from __future__ import annotations

import logging

logger = logging.getLogger("raykv")


def register() -> None:
    """Register the connector; vLLM calls this in each of its processes, some more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "RayKVConnector" in KVConnectorFactory._registry:
        return
    try:
        KVConnectorFactory.register_connector(
            "RayKVConnector", "raykv.vllm.connector", "RayKVConnector"
        )
    except ValueError:
        logger.debug("RayKVConnector is registered already")
