"""What a cluster has of its parts is there as if it were its own."""

from __future__ import annotations

import inspect

import raykv
from raykv.client.cluster import _method
from raykv.client.scheduler import Scheduler


def test_methods_have_signatures_and_docstrings_wherever_they_come_from() -> None:
    methods = inspect.getmembers(raykv.Cluster, inspect.isfunction)
    public = {name: method for name, method in methods if not name.startswith("_")}
    assert {"chunks", "lookup", "log", "pin", "pins", "move", "import_chunks"} <= public.keys()
    for name, method in public.items():
        assert "self" in inspect.signature(method).parameters, name
        assert method.__doc__ or name == "close", name


def test_method_of_a_part_is_called_with_the_clusters_scheduler() -> None:
    def question(scheduler: Scheduler, name: str, *, count: int = 1) -> tuple[Scheduler, str, int]:
        """What was asked."""
        return scheduler, name, count

    class Asking(raykv.Cluster):
        asked = _method(question)

    cluster = Asking("here", joined_here=False)
    scheduler, *rest = cluster.asked("a", count=2)
    assert (scheduler.address, rest) == ("here", ["a", 2])
    assert cluster.asked.__doc__ == "What was asked."
    assert "keys" in inspect.signature(cluster.pin).parameters
