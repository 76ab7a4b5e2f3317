"""The machines a kernel can run on: source assembly, compilation, launch, device limits."""
