"""Tenants: who a request is of, in a short text that may be shown.

A tenant is known by its label: one that the server has set, or a digest of the request's
`cache_salt`. A salt may be a secret, and is never part of anything that is shown or sent. The
digest is not: who knows it and guesses the salt can see that the guess was right, so salts should
be long and random. It is long enough that nobody finds another salt for it.
"""

from __future__ import annotations

import hashlib

OTHERS = "others"
"""All whose requests name no tenant, and those beyond the number of tenants that are distinguished.
"""

SALTED = "salt:"
"""Beginning of labels that come from salts; no server's label begins so."""

MAX_LABEL = 64
"""Characters of a label."""

_DIGITS = 20
"""Of 4 bits each."""


def salt_label(salt: str) -> str:
    """The label of requests with that `cache_salt`; empty without one."""
    if not salt:
        return ""
    digest = hashlib.sha256(b"raykv tenant\0" + salt.encode(errors="surrogatepass")).hexdigest()
    return SALTED + digest[:_DIGITS]


def is_label(label: str) -> bool:
    """Whether a tenant may be called so."""
    return 0 < len(label) <= MAX_LABEL and label.isprintable() and label != OTHERS


def server_label(label: object) -> str:
    """The label that a server has set, if it may set it; else none."""
    if not isinstance(label, str) or label.startswith(SALTED) or not is_label(label):
        return ""
    return label
