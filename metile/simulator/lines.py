"""Source lines of addresses in a shared library, from its DWARF line tables (versions 4 and 5)."""

from __future__ import annotations

import bisect
import functools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from metile.simulator import dwarf
from metile.simulator.dwarf import Reader

_OWN_FILE = re.compile(r"^<|(^|/)prelude-[0-9a-f]+\.h$")


@dataclass(frozen=True)
class Place:
    """A line of a source file."""

    file: str
    line: int

    def __str__(self) -> str:
        """Return ``file:line``."""
        return f"{self.file}:{self.line}"

    @property
    def own(self) -> bool:
        """Tell whether it is of the simulator's prelude, not of the kernel."""
        return _OWN_FILE.search(self.file) is not None


@dataclass
class LineTable:
    """The line table of one compilation unit.

    Attributes:
        files: names, by the number that DWARF gives them.
        rows: address, file and line where a stretch of code begins; file -1 where one ends. Sorted by address.
    """

    files: list[str] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)

    def name(self, number: int) -> str:
        """Return a file's name."""
        return self.files[number] if 0 <= number < len(self.files) else ""

    def find(self, address: int) -> Place | None:
        """Return the line of an address."""
        at = bisect.bisect_right(self.rows, (address, 1 << 62, 0)) - 1
        if at < 0 or self.rows[at][1] < 0:
            return None
        _, file, line = self.rows[at]
        return Place(self.name(file), line)


@dataclass(frozen=True)
class _Header:
    minimum: int
    default_is_statement: int
    line_base: int
    line_range: int
    opcode_base: int
    lengths: list[int]


def _file_names(reader: Reader, sections: Mapping[str, bytes]) -> list[str]:
    """Read one of the two tables of version 5: folders, then files; only the names are kept."""
    formats = [(reader.leb(), reader.leb()) for _ in range(reader.number(1))]
    names = []
    for _ in range(reader.leb()):
        name = ""
        for content, form in formats:
            value = reader.form(form)
            if content == 1:
                name = value if isinstance(value, str) else _string(sections, form, value)
        names.append(name)
    return names


def _string(sections: Mapping[str, bytes], form: int, value: int | bytes) -> str:
    section = {0x1F: ".debug_line_str", 0x0E: ".debug_str"}.get(form)
    return Reader(sections.get(section, b""), value).text() if section and isinstance(value, int) else ""


def _old_file_names(reader: Reader) -> list[str]:
    """Read the tables of version 4, in which files count from 1."""
    while reader.text():
        pass
    names = [""]
    while name := reader.text():
        names.append(name)
        for _ in range(3):
            reader.leb()
    return names


def _table(sections: Mapping[str, bytes], at: int) -> LineTable:
    reader = Reader(sections[".debug_line"], at)
    end = reader.number(4) + reader.at
    version = reader.number(2)
    if version >= 5:
        reader.at += 2
    begin = reader.number(4) + reader.at
    minimum, _, default = reader.number(1), reader.number(1), reader.number(1)
    base, span, opcodes = reader.number(1), reader.number(1), reader.number(1)
    lengths = [reader.number(1) for _ in range(opcodes - 1)]
    header = _Header(minimum, default, base - 256 if base > 127 else base, span, opcodes, lengths)
    if version >= 5:
        _file_names(reader, sections)
        files = _file_names(reader, sections)
    else:
        files = _old_file_names(reader)
    reader.at = begin
    return LineTable(files, sorted(_rows(reader, end, header)))


class _Machine:
    """The state of DWARF's line-number program."""

    def __init__(self) -> None:
        self.address, self.file, self.line = 0, 1, 1

    def row(self) -> tuple[int, int, int]:
        return self.address, self.file, self.line


def _rows(reader: Reader, end: int, header: _Header) -> Iterator[tuple[int, int, int]]:
    machine = _Machine()
    while reader.at < end:
        opcode = reader.number(1)
        if opcode >= header.opcode_base:
            step = opcode - header.opcode_base
            machine.address += step // header.line_range * header.minimum
            machine.line += header.line_base + step % header.line_range
            yield machine.row()
        elif opcode == 0:
            size = reader.leb()
            after, extended = reader.at + size, reader.number(1)
            if extended == 1:
                yield machine.address, -1, 0
                machine = _Machine()
            elif extended == 2:
                machine.address = reader.number(size - 1)
            reader.at = after
        elif opcode == 1:
            yield machine.row()
        else:
            _standard(reader, opcode, machine, header)


def _standard(reader: Reader, opcode: int, machine: _Machine, header: _Header) -> None:
    if opcode == 2:
        machine.address += reader.leb() * header.minimum
    elif opcode == 3:
        machine.line += reader.signed_leb()
    elif opcode == 4:
        machine.file = reader.leb()
    elif opcode == 8:
        machine.address += (255 - header.opcode_base) // header.line_range * header.minimum
    elif opcode == 9:
        machine.address += reader.number(2)
    else:
        for _ in range(header.lengths[opcode - 1]):
            reader.leb()


@dataclass(frozen=True)
class _Inlined:
    """A call that was inlined: the addresses it became, where it was written, how deep it lies."""

    ranges: list[tuple[int, int]]
    depth: int
    file: int
    line: int


@dataclass(frozen=True)
class _Unit:
    table: LineTable
    calls: list[_Inlined]

    def places(self, address: int) -> list[Place]:
        """Return the line of an address, then those of the inlined calls around it, the innermost first."""
        place = self.table.find(address)
        if place is None:
            return []
        around = [call for call in self.calls if any(low <= address < high for low, high in call.ranges)]
        around.sort(key=lambda call: -call.depth)
        return [place, *(Place(self.table.name(call.file), call.line) for call in around)]


def _units(data: bytes) -> Iterator[_Unit]:
    sections = dwarf.elf_sections(data)
    if ".debug_line" not in sections:
        return
    for version, entries in dwarf.units(sections):
        offset = entries[0].get(dwarf.STMT_LIST) if entries else None
        if offset is None:
            continue
        ranges = dwarf.Ranges(sections, version, entries[0])
        calls = [
            _Inlined(ranges.of(one), one.depth, one.get(dwarf.CALL_FILE) or 0, one.get(dwarf.CALL_LINE) or 0)
            for one in entries
            if one.tag == dwarf.INLINED
        ]
        yield _Unit(_table(sections, offset), calls)


@functools.lru_cache(maxsize=64)
def _units_of(path: Path) -> list[_Unit]:
    try:
        return list(_units(path.read_bytes()))
    except (OSError, ValueError, LookupError, ArithmeticError, struct.error):
        return []


def find_places(path: Path, address: int) -> list[Place]:
    """Return all lines of an address of a shared library: of the code, then of the inlined calls around it.

    Args:
        path: of the library.
        address: relative to where it is loaded.
    """
    for unit in _units_of(path):
        if places := unit.places(address):
            return places
    return []


def find_place(path: Path, address: int) -> Place | None:
    """Return the innermost line of an address that is not of the prelude; None where it is unknown.

    Args:
        path: of the library.
        address: relative to where it is loaded.
    """
    places = [place for place in find_places(path, address) if place.line]
    return next((place for place in places if not place.own), places[0] if places else None)
