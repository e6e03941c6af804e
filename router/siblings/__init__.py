"""The processes of one router (`--router-processes`): what each tells the others, and how that adds up."""

from __future__ import annotations

from common.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
