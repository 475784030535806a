"""`raykv demo`: ask a real model about long documents, with and without RayKV, and compare."""

from raykv.lab.demo.run import run_demo

__all__ = ["run_demo"]
