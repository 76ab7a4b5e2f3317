"""Metal kernels on a machine without Metal."""
