"""Prefill and decode engines as one application."""
