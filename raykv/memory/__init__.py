"""Memory that several processes share: the pool, exported KV caches, cancel words."""
