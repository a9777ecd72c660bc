"""Configuration: schema (pydantic), loading (Hydra) and cross-checks. Needs neither torch nor ray.

`load_config` is imported when it is first used, so that workers, which only import schemas, do not load Hydra.
"""

from lazy_loader import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
