"""All NodeActors of a cluster, as this process asks them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from raykv.base.deadlines import CLIENT_S
from raykv.base.errors import ClusterError
from raykv.cluster import ask
from raykv.protocol.framing import S

logger = logging.getLogger("raykv")


def ask_each(
    kind: type[S],
    question: ask.NodeQuestion,
    of: Collection[str] | None = None,
    deadline_s: float = CLIENT_S,
) -> dict[str, S]:
    """`ask.ask_nodes`, where what some nodes say is worth something without the others: who does
    not answer is named in a warning.

    Raises:
        ClusterError: Ray does not answer, or no node does.
    """
    found, silent = ask.ask_nodes(kind, question, of, deadline_s)
    if silent and not found:
        raise ClusterError(f"the NodeActors do not answer: {_named(silent)}")
    warn_of(silent)
    return found


def warn_of(silent: Mapping[str, str]) -> None:
    """Name the nodes that do not answer, by node and with the reason, if there are any."""
    if silent:
        logger.warning("what follows is without %s", _named(silent))


def _named(silent: Mapping[str, str]) -> str:
    return "; ".join(f"node {node_id[:12]} ({why})" for node_id, why in sorted(silent.items()))
