"""Benchmarks: RayKV compared with its alternatives, and with what the machine can do.

Each module has one `run(options)`; `command` names them all. The subjects take turns, so that a
slow second of the machine hits all of them. Ratios are medians of the ratios within each repeat.
"""
