"""Every Python example in README.md and docs/ runs, a file's in one go; links between the files lead somewhere."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

import pytest

from metile.files import CACHE_VARIABLE, cache_root

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<word>\S*) *(?P<mark>[^\n]*)\n(?P<text>.*?)^(?P=indent)``` *$", re.M | re.S)
LINK = re.compile(r"\]\((?P<path>[^)#:\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
MARKS = ("", "no-run")


@dataclass(frozen=True)
class Block:
    """A fenced example: where it begins, its text, and what stands behind ```python."""

    path: Path
    line: int
    text: str
    mark: str

    def compiled(self) -> CodeType:
        """Return its code; an error in it names the line of the document."""
        return compile("\n" * self.line + textwrap.dedent(self.text), str(self.path), "exec")


def python_blocks(path: Path, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        if match["word"] == "python":
            yield Block(path, text[: match.start()].count("\n") + 1, match["text"], match["mark"].strip())


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the examples an empty cache, but for compiled kernels, and a folder of their own."""
    kernels, cache, work = cache_root() / "kernels", tmp_path / "cache", tmp_path / "work"
    cache.mkdir()
    work.mkdir()
    if kernels.is_dir():
        (cache / "kernels").symlink_to(kernels.resolve())
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    monkeypatch.chdir(work)
    return work


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_examples_of_a_file_run(path: Path, own_cache: Path) -> None:
    names: dict[str, object] = {"__name__": "__example__"}
    for block in python_blocks(path, path.read_text()):
        assert block.mark in MARKS, f"{path.name}:{block.line}: expected {MARKS} but got {block.mark!r}"
        code = block.compiled()
        if block.mark != "no-run":
            exec(code, names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_links_within_the_repository_lead_somewhere(path: Path) -> None:
    for match in LINK.finditer(path.read_text()):
        target = (path.parent / match["path"]).resolve() if match["path"] else path
        assert target.exists(), match[0]
        if match["anchor"]:
            assert match["anchor"] in anchors(target.read_text()), match[0]


def test_the_documents_are_there_and_have_examples() -> None:
    assert {"kernels.md", "tuning.md", "patching.md"} <= {path.name for path in FILES}
    assert len(list(python_blocks(FILES[0], (ROOT / "docs" / "patching.md").read_text()))) >= 3


def test_blocks_are_told_by_their_language_and_mark() -> None:
    text = "a\n```python\nx = 1\n```\n\n```\nnone\n```\n- item\n\n  ```python no-run\n  y = 1\n  ```\n"
    text += "```cpp\nint x;\n```\n"
    found = list(python_blocks(Path("a.md"), text))
    assert [(block.line, block.text, block.mark) for block in found] == [
        (2, "x = 1\n", ""),
        (11, "  y = 1\n", "no-run"),
    ]
    assert found[1].compiled()


def test_an_error_in_an_example_names_its_line() -> None:
    block = next(python_blocks(Path("a.md"), "one\ntwo\n```python\nx = 1\n1 / 0\n```\n"))
    with pytest.raises(ZeroDivisionError) as caught:
        exec(block.compiled(), {})
    assert caught.traceback[-1].lineno + 1 == 5
