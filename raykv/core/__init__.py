"""State machines of RayKV: plain Python, no Ray, torch, threads, clock or randomness."""
