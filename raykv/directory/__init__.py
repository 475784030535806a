"""The scheduler actor: who holds which chunk, leases, pins, transfers, listings, the log."""
