"""Values of a metric's label with a bound: who comes late shares one called "other"."""

from __future__ import annotations

MOST = 32
"""Namespaces in the metrics of one actor: models that share a cluster are a few."""

SHORT = 12
"""Characters of a namespace that people see."""

OTHER = "other"


class NamespaceLabels:
    """A namespace keeps its label for ever; the memory for them is bounded."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[str, str] = {}

    def __getitem__(self, namespace: str) -> str:
        known = self._known.get(namespace)
        if known is not None:
            return known
        if len(self._known) >= self._most:
            return OTHER
        # A digest, unless a message says otherwise: then it must not become anything odd.
        short = "".join(letter if letter.isprintable() else "?" for letter in namespace[:SHORT])
        self._known[namespace] = short
        return short
