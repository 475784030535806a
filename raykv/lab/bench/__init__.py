"""Benchmarks: RayKV beside what a user would pick instead, and beside what the machine can do.

Each module has one `run(options)`; `command` names them all. Timings alternate between the
subjects, so that a slow second of the machine hits all of them, and ratios are medians of the
ratios within each repeat.
"""
