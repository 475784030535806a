"""What the directory answers: listings, prefixes, keys' places, misses, snapshots, status."""
