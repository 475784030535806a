"""Hidden states: captured out of KV blocks, held in memory, written to files."""
