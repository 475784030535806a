"""vLLM with RayKV over HTTP: `raykv serve` on one machine, applications for Ray Serve.

The builders are what `import_path` of a Serve configuration names; `deploy/serve` has examples.
"""

from __future__ import annotations

import lazy_loader

# Ray and vLLM are imported only when a part that needs them is asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
