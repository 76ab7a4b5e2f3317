"""The machines a kernel can run on: source assembly, compilation, launch and device limits, a module a target."""
