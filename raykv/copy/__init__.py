"""Copies between KV caches and the pool: planning, queueing, back ends."""
