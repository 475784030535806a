"""All of vLLM that RayKV touches beyond its interfaces.

`names` has what it does not start without.
"""
