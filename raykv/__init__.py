"""RayKV: vLLM's KV cache in the RAM of a Ray cluster."""

from __future__ import annotations

import logging
import sys
import warnings

import lazy_loader

if "ipykernel" in sys.modules:
    # Notebooks print in red what Ray says where ipywidgets are missing, and what torchvision says
    # without its compiled part, when they are imported. Nothing here needs either.
    warnings.filterwarnings("ignore", "IProgress not found")
    warnings.filterwarnings("ignore", "Failed to load image Python extension")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)

# The client, and with it Ray, is imported only when it is asked for.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
