"""The table in flat arrays, compiled by numba; only the scheduler actor loads it."""
