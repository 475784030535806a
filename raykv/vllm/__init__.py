"""RayKV inside vLLM: connector, spec, manager, worker. The only part that imports vLLM."""
