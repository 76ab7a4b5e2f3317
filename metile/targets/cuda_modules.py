"""Handing MLX a compiled kernel once, not at every launch.

`mx.fast.precompiled_cuda_kernel` takes the binary at every launch, copies it twice and hashes it, to find the module
that it loaded the first time: some 10 us for 20 KB. Before it loads a module, MLX looks for it in its folder of
compiled kernels, under the name of the kernel and the hash of what it was handed. So the binary is put there while the
first launch loads it, and every launch hands over nothing at all. An MLX that does otherwise fails to load the module,
which is noticed, and then the binary is handed over as before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from metile.files import write_atomic

_HASH_OF_NOTHING = "553e93901e462a6e"  # std::hash of an empty string, as libstdc++ gives it
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in the order of std::filesystem::temp_directory_path


def folder() -> Path:
    """Return where MLX looks for compiled kernels."""
    given = os.environ.get("MLX_PTX_CACHE_DIR")
    if given:
        return Path(given)
    temporary = next((os.environ[name] for name in _TEMPORARY if os.environ.get(name)), "/tmp")
    return Path(temporary) / "mlx" / str(vars(mx)["__version__"]) / "ptx"


@contextmanager
def offered(name: str, cubin: bytes) -> Iterator[None]:
    """Keep a binary where MLX finds it, under a kernel's name, as long as the context lasts.

    Args:
        name: of the kernel and of its function in the binary; no other kernel may ever have it.
        cubin: the binary.

    Raises:
        OSError: the folder cannot be written.
    """
    module = f"{name}_{_HASH_OF_NOTHING}"
    names, binary = folder() / f"{module}.txt", folder() / f"{module}.ptx"
    try:
        write_atomic(names, f"{name}\t{name}\n".encode())
        write_atomic(binary, cubin)  # last: MLX takes the pair for whole once it sees this one
        yield
    finally:
        binary.unlink(missing_ok=True)
        names.unlink(missing_ok=True)
