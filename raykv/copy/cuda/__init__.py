"""Copies on GPUs: streams, batches, the gathering kernel, what a device was measured to do."""
