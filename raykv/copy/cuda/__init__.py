"""Copies on GPUs: streams, batches, and the kernel that gathers small pages."""
