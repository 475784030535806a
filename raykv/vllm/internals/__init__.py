"""All of vLLM that RayKV touches beyond its interfaces: `names` has each with what it is for."""
