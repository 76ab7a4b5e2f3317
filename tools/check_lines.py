"""Fail when a source file is longer than the cap: ``python tools/check_lines.py [ROOT]``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

CAP = 400
SUFFIXES = frozenset({".py", ".h", ".cpp", ".metal", ".cu"})
BUILT = frozenset({"build", "dist", "__pycache__"})


def source_files(folder: Path) -> Iterator[Path]:
    """Yield the source files below a folder, without hidden folders, virtual environments and built files."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in BUILT:
            continue
        if path.is_dir() and not (path / "pyvenv.cfg").exists():
            yield from source_files(path)
        elif path.suffix in SUFFIXES:
            yield path


def main(root: Path) -> int:
    """Print each file above the cap with its length; return the exit status."""
    lengths = {path: len(path.read_text().splitlines()) for path in source_files(root)}
    long = {path: length for path, length in lengths.items() if length > CAP}
    for path, length in long.items():
        print(f"{path.relative_to(root)}: {length} lines, the cap is {CAP}")
    if not long:
        print(f"{len(lengths)} source files, none above {CAP} lines")
    return 1 if long else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
