"""Configuration: schema (pydantic), loading (Hydra) and cross-checks. Needs neither torch nor ray.

`load_config` is imported when first used: workers import schemas, and do not need Hydra.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
