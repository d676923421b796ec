"""A partitioned, Arrow-native message log with fenced consumer groups, on the coordination store you already have."""

from __future__ import annotations

from importlib.metadata import version as _version

from pxrs import errors
from pxrs.registry import ABSENT

__version__ = _version("pxrs")
__all__ = ["ABSENT", "__version__", "errors"]
