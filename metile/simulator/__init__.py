"""Metal kernels on a machine without Metal: run, checked and counted on its processor.

`metal_kernel` is a drop-in for `mx.fast.metal_kernel`; `install` puts it in that place for other people's code;
`MetalFile` runs a plain ``.metal`` file; ``python -m metile.simulator`` is the command. docs/simulator.md tells more.
"""

from metile.simulator.devices import DEVICES, Device, custom, find_device
from metile.simulator.file import Empty, MetalFile, Run
from metile.simulator.findings import Finding, FindingsError
from metile.simulator.install import install, installed, is_installed, uninstall
from metile.simulator.kernel import MetalKernel, metal_kernel
from metile.simulator.runtime import Launch, SimulatorFault

__all__ = [
    "DEVICES",
    "Device",
    "Empty",
    "Finding",
    "FindingsError",
    "Launch",
    "MetalFile",
    "MetalKernel",
    "Run",
    "SimulatorFault",
    "custom",
    "find_device",
    "install",
    "installed",
    "is_installed",
    "metal_kernel",
    "uninstall",
]
