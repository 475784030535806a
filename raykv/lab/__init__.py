"""Instruments: benchmarks, chaos, the demo, and hosts for them.

Only the command line imports them.
"""
