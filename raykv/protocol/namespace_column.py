"""Namespaces of rows as they cross processes: each once, and for each row its number."""

from __future__ import annotations

from collections.abc import Sequence

from raykv.base.ids import Namespace


def namespace_column(of_rows: Sequence[Namespace]) -> tuple[list[str], list[int]]:
    """The different namespaces, and for each row where its own is among them."""
    namespaces = sorted({str(namespace) for namespace in of_rows})
    index = {namespace: number for number, namespace in enumerate(namespaces)}
    return namespaces, [index[namespace] for namespace in of_rows]
