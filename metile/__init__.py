"""metile: custom kernels for MLX models, chosen by an autotuner on the machine at hand."""

__version__ = "0.1.0"
