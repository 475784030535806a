"""Where the compiled loops are kept between two starts of the scheduler actor.

Numba compiles a function again when that function's own file has changed, but not when one has that
it calls or takes constants from: an update of RayKV would go on with a part of its old layout. So
each state of the sources has a folder of its own.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from raykv.base.ownership import make_own_folder
from raykv.directory.table import worth


def folder() -> Path:
    """A folder for what is compiled from these sources. It is code: nobody else can write there."""
    for base in _bases():
        found = base / f"raykv-{_digest()}"
        try:
            make_own_folder(found)
            tempfile.TemporaryFile(dir=found).close()
        except OSError:
            continue
        return found
    # Nothing is kept in it: everything is compiled at each start.
    return Path(tempfile.mkdtemp(prefix="raykv-"))


def _bases() -> Iterator[Path]:
    """What the user has named for numba, beside the sources, the user's cache."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    if named:
        yield Path(named)
    yield Path(__file__).parent / "__pycache__"
    cache = os.environ.get("XDG_CACHE_HOME")
    yield Path(cache) if cache else Path("~/.cache").expanduser()


def _digest() -> str:
    """A digest of all that is compiled."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), Path(worth.__file__)]
    made = hashlib.sha256()
    for source in sources:
        made.update(source.read_bytes())
    return made.hexdigest()[:16]
