"""Rules of Metal on clang's syntax tree (``-ast-dump=json``)."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from metile.simulator.thread import DROPPED

_MARKER = re.compile(r'^#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"')
_UNQUALIFIED = re.compile(r"__generic\b[^,()<>]*(\[[^]]*\])?[*&]|__generic\b[^,()<>]*\([*&]")
# A reference to a pointer that names its space, as in ``const device T*& p``, is legal.
_TO_POINTER = re.compile(r"\* ?__generic ?&")
_FUNCTIONS = ("FunctionDecl", "CXXMethodDecl", "CXXConstructorDecl", "CXXDestructorDecl", "CXXConversionDecl")
_CASTS = ("CStyleCastExpr", "CXXStaticCastExpr", "CXXReinterpretCastExpr", "CXXFunctionalCastExpr")
_SPACES = {"__global": "device", "__local": "threadgroup", "__constant": "constant"}


@dataclass(frozen=True)
class Violation:
    """What Apple's compiler rejects, and where."""

    file: str
    line: int
    reason: str


class Lines:
    """Which line of which file a line of a text with line markers is."""

    def __init__(self, text: str) -> None:
        self._starts: list[int] = [0]
        self._marks: list[tuple[str, int]] = [("", 1)]
        self.lines = text.splitlines()
        for index, line in enumerate(self.lines):
            if marker := _MARKER.match(line):
                self._starts.append(index + 1)
                self._marks.append((marker.group(2), int(marker.group(1))))

    def place(self, physical: int) -> tuple[str, int]:
        """Return the file and the line of the `physical` line (from 1)."""
        at = bisect.bisect_right(self._starts, physical - 1) - 1
        file, line = self._marks[at]
        return file, line + physical - 1 - self._starts[at]

    def text(self, physical: int) -> str:
        """Return the `physical` line."""
        return self.lines[physical - 1] if 0 < physical <= len(self.lines) else ""


@dataclass
class Node:
    """A node of the tree; `line` is the physical line, 0 outside the text."""

    raw: Mapping[str, Any]
    parent: Node | None
    line: int = 0
    children: list[Node] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The class of clang's node."""
        return str(self.raw.get("kind", ""))

    @property
    def type(self) -> str:
        """Its type as written, and as it is."""
        kinds = self.raw.get("type", {})
        return f"{kinds.get('qualType', '')} | {kinds.get('desugaredQualType', '')}"

    def ancestors(self) -> Iterator[Node]:
        """Yield the nodes around it, the nearest first."""
        node = self.parent
        while node is not None:
            yield node
            node = node.parent


class _Reader:
    """Turns the tree into nodes; clang names a file and a line only where they change."""

    def __init__(self) -> None:
        self._file, self._line = "", 0
        self.nodes: list[Node] = []

    def read(self, raw: Mapping[str, Any], parent: Node | None) -> Node | None:
        node = Node(raw, parent)
        self.nodes.append(node)
        for key, value in raw.items():
            if key == "loc":
                node.line = self._place(value)
            elif key == "range":
                begin = self._place(value.get("begin", {}))
                self._place(value.get("end", {}))
                node.line = node.line or begin
            elif key == "inner":
                node.children = [child for one in value if one and (child := self.read(one, node))]
        return None if raw.get("isImplicit") and raw.get("kind") in _FUNCTIONS else node

    def _place(self, place: Mapping[str, Any]) -> int:
        found = 0
        for one in (place.get("spellingLoc"), place.get("expansionLoc"), place):
            if one and "offset" in one:
                self._file = one.get("file", self._file)
                self._line = one.get("line", self._line)
                found = self._line if self._file == "<stdin>" else 0
        return found


def violations(tree: Mapping[str, Any], lines: Lines) -> Iterator[Violation]:
    """Yield what the rules find in clang's tree of the text that has these lines."""
    reader = _Reader()
    reader.read(tree, None)
    hidden = _hidden(reader.nodes)
    nodes = [node for node in reader.nodes if node.line and id(node) not in hidden]
    methods = {
        str(node.raw["id"]): node
        for node in nodes
        if node.kind in ("CXXMethodDecl", "CXXConversionDecl") and not node.raw.get("isImplicit")
    }
    for node in nodes:
        file, line = lines.place(node.line)
        if file.startswith("<"):
            continue
        text = lines.text(node.line)
        found = (_declaration(node, text), _function(node, text), _variable(node), _cast(node), _bfloat(node))
        for reason in (*found, _call(node, methods)):
            if reason:
                yield Violation(file, line, reason)
    for node in _recursive(nodes):
        yield Violation(*lines.place(node.line), f"function '{node.raw.get('name')}' is recursive")


def _hidden(nodes: list[Node]) -> set[int]:
    """Return the nodes inside what clang added by itself."""
    hidden: set[int] = set()
    for node in nodes:
        implicit = node.raw.get("isImplicit") and node.kind in _FUNCTIONS
        if implicit or (node.parent is not None and id(node.parent) in hidden):
            hidden.add(id(node))
    return hidden


def _unqualified(kind: str) -> bool:
    """Tell whether a type points, or refers, to something without saying to which space."""
    return _UNQUALIFIED.search(_TO_POINTER.sub("* &", kind)) is not None


def _declaration(node: Node, text: str) -> str:
    """A variable, parameter or member that points somewhere without saying to which space."""
    if node.kind not in ("VarDecl", "ParmVarDecl", "FieldDecl") or not _unqualified(node.type):
        return ""
    if re.search(r"\bauto\b", text) or DROPPED in text:
        return ""
    what = {"VarDecl": "variable", "ParmVarDecl": "parameter", "FieldDecl": "member"}[node.kind]
    return f"pointer or reference without an address space: {what} '{node.raw.get('name', '')}'"


def _function(node: Node, text: str) -> str:
    """A function that returns a pointer without a space."""
    if node.kind not in _FUNCTIONS:
        return ""
    returned = str(node.raw.get("type", {}).get("qualType", "")).partition("(")[0].strip()
    if _unqualified(returned) and DROPPED not in text and not re.search(r"\bauto\b", text):
        return f"pointer or reference without an address space: what function '{node.raw.get('name', '')}' returns"
    return ""


def _variable(node: Node) -> str:
    """A variable at program scope, or a static one, that is not in constant memory; threadgroup memory off a kernel."""
    if node.kind not in ("VarDecl", "VarTemplateSpecializationDecl") or node.raw.get("storageClass") == "extern":
        return ""
    name = str(node.raw.get("name", ""))
    around = list(node.ancestors())
    inside = any(one.kind in _FUNCTIONS for one in around)
    if name.startswith("__msl_key_"):
        return ""
    if "__constant" in node.type:
        return ""
    if not inside:
        return f"program-scope variable '{name}' must be in the constant address space"
    if node.raw.get("storageClass") == "static":
        return f"static local variable '{name}' must be in the constant address space"
    return ""


def _cast(node: Node) -> str:
    if node.kind in _CASTS and _UNQUALIFIED.search(node.type.replace("__generic", "__generic ") + " "):
        return "cast to a pointer or reference without an address space"
    return ""


def _bfloat(node: Node) -> str:
    """Narrowing to bfloat is explicit in Metal."""
    if node.kind != "ImplicitCastExpr" or node.raw.get("castKind") != "FloatingCast":
        return ""
    explicit = node.raw.get("isPartOfExplicitCast") or (node.parent is not None and node.parent.kind in _CASTS)
    if explicit or not re.search(r"\b(__bf16|bfloat)\b", node.type):
        return ""
    source = node.children[0].type.partition(" |")[0] if node.children else "float"
    return f"implicit conversion from '{source}' to 'bfloat'"


def _call(node: Node, methods: Mapping[str, Node]) -> str:
    """A method of thread memory called on an object elsewhere."""
    if node.kind == "MemberExpr":
        method, target = methods.get(str(node.raw.get("referencedMemberDecl", ""))), node.children[:1]
    elif node.kind == "CXXOperatorCallExpr" and len(node.children) > 1:
        callee = [one for one in _below(node.children[0]) if one.kind == "DeclRefExpr"]
        reference = callee[0].raw.get("referencedDecl", {}).get("id", "") if callee else ""
        method, target = methods.get(str(reference)), node.children[1:2]
    else:
        return ""
    if method is None or not target:
        return ""
    for cast in _below(target[0]):
        if cast.kind != "ImplicitCastExpr" or not cast.children:
            return ""
        if cast.raw.get("castKind") == "AddressSpaceConversion":
            return _moved(method, cast)
    return ""


def _moved(method: Node, cast: Node) -> str:
    space = next((metal for word, metal in _SPACES.items() if word in cast.children[0].type), "")
    if "__generic" not in cast.type or not space:
        return ""
    return f"method '{method.raw.get('name')}' has no '{space}' qualifier but is called on an object in {space} memory"


def _below(node: Node) -> Iterator[Node]:
    """Yield the node and what its only, or first, children hold."""
    while True:
        yield node
        if not node.children:
            return
        node = node.children[0]


def _recursive(nodes: list[Node]) -> Iterator[Node]:
    """Yield the functions that call themselves, directly or not."""
    functions = {str(node.raw["id"]): node for node in nodes if node.kind in _FUNCTIONS}
    same = {name: _first(name, functions) for name in functions}
    calls: dict[str, set[str]] = {}
    for node in nodes:
        if node.kind not in ("DeclRefExpr", "MemberExpr"):
            continue
        called = str(node.raw.get("referencedDecl", {}).get("id") or node.raw.get("referencedMemberDecl", ""))
        caller = next((str(one.raw["id"]) for one in node.ancestors() if one.kind in _FUNCTIONS), "")
        if called in same and caller in same:
            calls.setdefault(same[caller], set()).add(same[called])
    for name in calls:
        if name in _reached(calls, name):
            yield functions[name]


def _first(name: str, functions: Mapping[str, Node]) -> str:
    """Return the first declaration of the function."""
    while (previous := str(functions[name].raw.get("previousDecl", ""))) in functions:
        name = previous
    return name


def _reached(calls: Mapping[str, set[str]], start: str) -> set[str]:
    """Return what `start` calls, and what those call."""
    found: set[str] = set()
    waiting = list(calls.get(start, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting.extend(calls.get(name, ()))
    return found
