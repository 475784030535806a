"""Memory that processes share: regions, the pool and its journal, pages, forms of a KV cache."""
