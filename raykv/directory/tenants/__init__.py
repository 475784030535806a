"""Tenants: what each may take of pools and disks, and whose chunks are evicted for that."""
