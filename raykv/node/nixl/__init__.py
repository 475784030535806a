"""Reads from other nodes through NIXL, and what their sources do for it."""
