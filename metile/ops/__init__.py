"""The kernel families: for each its key, its search space, its launch and its plain-MLX reference, a file a family."""
