"""All of vLLM that RayKV touches beyond its interfaces: see `names`."""
