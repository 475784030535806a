"""What pydantic finds wrong, in a sentence."""

from __future__ import annotations

from pydantic import ValidationError


def complaints(error: ValidationError) -> str:
    """Each place, and what is wrong with it."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'args'}: {each['msg']}" for each in error.errors()
    )
