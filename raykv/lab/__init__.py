"""Instruments: benchmarks, chaos, the demo, hosts for them. The product never imports them."""
