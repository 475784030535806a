"""Look into a running cache: pandas frames, KV as tensors, plots, what-if.

    import raykv, raykv.inspect

    with raykv.connect() as cluster:
        print(raykv.inspect.nodes(cluster))
        print(raykv.inspect.requests(cluster).tail())

Needs the extra `inspect` (pandas, matplotlib); tensors need torch. Nothing here changes
the cache: chunks are copied out, and engines are not asked.
"""

from __future__ import annotations

import lazy_loader

# Ray, pandas and matplotlib are imported only when a part that needs them is asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
