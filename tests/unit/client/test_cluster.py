"""What a cluster has of its parts is there as if it were its own."""

from __future__ import annotations

import inspect

import raykv


def test_methods_have_signatures_and_docstrings_wherever_they_come_from() -> None:
    methods = inspect.getmembers(raykv.Cluster, inspect.isfunction)
    public = {name: method for name, method in methods if not name.startswith("_")}
    assert {"chunks", "lookup", "log", "pin", "pins", "move", "import_chunks"} <= public.keys()
    for name, method in public.items():
        assert "self" in inspect.signature(method).parameters, name
        assert method.__doc__ or name == "close", name


def test_method_of_a_part_is_called_with_the_part() -> None:
    cluster = raykv.Cluster("here", joined_here=False)
    assert cluster.pins.__doc__ == raykv.Cluster.pins.__doc__
    assert "keys" in inspect.signature(cluster.pin).parameters
