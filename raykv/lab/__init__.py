"""Instruments: benchmarks, chaos, the demo. The product never imports them."""
