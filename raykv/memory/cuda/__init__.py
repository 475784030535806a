"""Memory of GPUs: the driver's calls, handles of KV caches, the pool page-locked."""
