"""How the scheduler actor is made: on Ray's head node, named, restarted for ever."""

from __future__ import annotations

from typing import Any

import ray

from raykv.base.settings import ANY_PORT, MetricsPlace
from raykv.cluster import names
from raykv.cluster.logs import level_for_actors
from raykv.cluster.names import HEAD_RESOURCE, SHARE_OF_HEAD
from raykv.directory.actor import SchedulerActor
from raykv.directory.pins import SHARE


def scheduler_actor(
    address: str,
    eviction_policy: str,
    pin_share: float = SHARE,
    metrics: MetricsPlace = ANY_PORT,
) -> Any:
    """The scheduler actor, created if there is none; creators that race get the same one.

    It lives on Ray's head node, without which there is no cluster, and on its successor: the loss
    of any other node does not cost the directory.
    """
    options = {
        "name": names.SCHEDULER,
        "namespace": names.RAY_NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "max_task_retries": 0,
        "num_cpus": 0,
        # An actor that needs nothing goes to any node, whatever affinity it has.
        "resources": {HEAD_RESOURCE: SHARE_OF_HEAD},
        "runtime_env": {"env_vars": {"RAY_worker_niceness": "0", **level_for_actors()}},
    }
    made = ray.remote(SchedulerActor).options(**options)
    return made.remote(address, eviction_policy, pin_share, metrics)
