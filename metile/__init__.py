"""metile: custom kernels for MLX models, chosen by an autotuner on the machine at hand."""

from metile.api import patch
from metile.dispatch import Plan
from metile.handle import Handle

__version__ = "0.1.0"
__all__ = ["Handle", "Plan", "patch"]
