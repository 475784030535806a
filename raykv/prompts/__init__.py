"""From a prompt to its chunks' keys: tokens, block hashes, prefixes, adapters."""
