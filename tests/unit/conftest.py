"""Hypothesis without deadlines: they count what other programs take of a busy machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")
