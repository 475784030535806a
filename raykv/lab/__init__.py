"""Instruments: benchmarks, chaos, the demo, hosts for them.

Of the product, the command line alone imports them.
"""
