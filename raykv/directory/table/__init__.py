"""The directory's table of chunks: its protocol, eviction orders, and its variants."""
