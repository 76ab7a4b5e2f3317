"""Reading ELF sections and DWARF entries: just what source lines with their inlined calls need."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_SKIP_BYTES = {0x0B: 1, 0x0C: 1, 0x11: 1, 0x05: 2, 0x12: 2, 0x06: 4, 0x13: 4, 0x07: 8, 0x14: 8, 0x20: 8, 0x01: 8}
_SKIP_BYTES |= {0x0E: 4, 0x10: 4, 0x17: 4, 0x1F: 4, 0x1E: 16, 0x19: 0}
_INDEXED_BYTES = {0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4, 0x29: 1, 0x2A: 2, 0x2B: 3, 0x2C: 4}
_LEB_FORMS = frozenset({0x0D, 0x0F, 0x15, 0x1A, 0x1B, 0x22, 0x23})
_FLAG_PRESENT, _IMPLICIT_CONST, _STRING, _ADDRESS = 0x19, 0x21, 0x08, 0x01
_BLOCK_BYTES = {0x0A: 1, 0x03: 2, 0x04: 4}
ADDRESS_FORMS = frozenset({0x01, 0x1B, 0x29, 0x2A, 0x2B, 0x2C})
INDEXED_ADDRESS_FORMS = ADDRESS_FORMS - {_ADDRESS}

LOW_PC, HIGH_PC, RANGES, CALL_FILE, CALL_LINE, STMT_LIST = 0x11, 0x12, 0x55, 0x58, 0x59, 0x10
ADDR_BASE, RNGLISTS_BASE = 0x73, 0x74
INLINED, COMPILE_UNIT = 0x1D, 0x11


def elf_sections(data: bytes) -> dict[str, bytes]:
    """Return the sections of a 64-bit little-endian ELF file by name."""
    if data[:6] != b"\x7fELF\x02\x01":
        return {}
    (offset,) = struct.unpack_from("<Q", data, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, offset + i * entry) for i in range(count)]
    _, _, _, _, at, size = headers[names_index]
    names = data[at : at + size]
    found = {}
    for name, kind, _, _, at, size in headers:
        text = names[name : names.index(b"\0", name)].decode()
        found[text] = data[at : at + size] if kind != 8 else b""
    return found


class Reader:
    """A position in bytes."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def number(self, count: int) -> int:
        """Read an unsigned integer of `count` bytes.

        Raises:
            IndexError: there are fewer.
        """
        self.at += count
        if self.at > len(self.data):
            raise IndexError("the data ends")
        return int.from_bytes(self.data[self.at - count : self.at], "little")

    def leb(self) -> int:
        """Read an unsigned LEB128 integer."""
        value = shift = 0
        while True:
            byte = self.data[self.at]
            self.at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def signed_leb(self) -> int:
        """Read a signed LEB128 integer."""
        begin = self.at
        value, bits = self.leb(), 7 * (self.at - begin)
        return value - (1 << bits) if value >> (bits - 1) else value

    def text(self) -> str:
        """Read a string that ends with a zero byte."""
        end = self.data.index(b"\0", self.at)
        begin, self.at = self.at, end + 1
        return self.data[begin:end].decode(errors="replace")

    def form(self, form: int) -> int | str | bytes:
        """Read an attribute's value; an index into another section is returned as it is.

        Raises:
            ValueError: a form that is not known here.
        """
        if form == _FLAG_PRESENT:
            return 1
        if form in _SKIP_BYTES:
            return self.number(_SKIP_BYTES[form])
        if form in _INDEXED_BYTES:
            return self.number(_INDEXED_BYTES[form])
        if form == 0x0D:
            return self.signed_leb()
        if form in _LEB_FORMS:
            return self.leb()
        if form == _STRING:
            return self.text()
        if form in _BLOCK_BYTES or form in (0x09, 0x18):
            size = self.number(_BLOCK_BYTES[form]) if form in _BLOCK_BYTES else self.leb()
            self.at += size
            return self.data[self.at - size : self.at]
        raise ValueError(f"DWARF form {form:#x}")


@dataclass(frozen=True)
class Entry:
    """A DWARF debugging entry.

    Attributes:
        tag: its kind.
        depth: how deep in the tree it lies.
        values: by attribute: the form and the value as it stands.
    """

    tag: int
    depth: int
    values: Mapping[int, tuple[int, int | str | bytes]]

    def get(self, attribute: int) -> int | None:
        """Return an attribute's number, or None where it has none."""
        value = self.values.get(attribute, (0, None))[1]
        return value if isinstance(value, int) else None


_Abbreviation = tuple[int, bool, list[tuple[int, int, int]]]


def _abbreviations(data: bytes, at: int) -> dict[int, _Abbreviation]:
    reader, found = Reader(data, at), {}
    while code := reader.leb():
        tag, children, attributes = reader.leb(), reader.number(1) != 0, []
        while True:
            attribute, form = reader.leb(), reader.leb()
            constant = reader.signed_leb() if form == _IMPLICIT_CONST else 0
            if not attribute and not form:
                break
            attributes.append((attribute, form, constant))
        found[code] = (tag, children, attributes)
    return found


def units(sections: Mapping[str, bytes]) -> Iterator[tuple[int, list[Entry]]]:
    """Yield the DWARF version and the entries of each compilation unit."""
    reader = Reader(sections.get(".debug_info", b""))
    while reader.at < len(reader.data):
        end = reader.number(4) + reader.at
        version = reader.number(2)
        if version >= 5:
            kind, _, abbreviations = reader.number(1), reader.number(1), reader.number(4)
            if kind in (4, 5):
                reader.at += 8
        else:
            abbreviations, _ = reader.number(4), reader.number(1)
        table = _abbreviations(sections.get(".debug_abbrev", b""), abbreviations)
        yield version, list(_entries(reader, end, table))
        reader.at = end


def _entries(reader: Reader, end: int, table: Mapping[int, _Abbreviation]) -> Iterator[Entry]:
    depth = 0
    while reader.at < end:
        code = reader.leb()
        if not code:
            depth -= 1
            continue
        tag, children, attributes = table[code]
        values = {
            attribute: (form, constant if form == _IMPLICIT_CONST else reader.form(form))
            for attribute, form, constant in attributes
        }
        yield Entry(tag, depth, values)
        depth += children


class Ranges:
    """Addresses that entries of one unit cover."""

    def __init__(self, sections: Mapping[str, bytes], version: int, unit: Entry) -> None:
        self._sections = sections
        self._version = version
        self._addresses = unit.get(ADDR_BASE) or 0
        self._lists = unit.get(RNGLISTS_BASE) or 0
        self._base = self._address(unit) or 0

    def _indexed(self, index: int) -> int:
        return Reader(self._sections.get(".debug_addr", b""), self._addresses + 8 * index).number(8)

    def _address(self, entry: Entry) -> int | None:
        form, value = entry.values.get(LOW_PC, (0, None))
        if not isinstance(value, int):
            return None
        return self._indexed(value) if form in INDEXED_ADDRESS_FORMS else value

    def of(self, entry: Entry) -> list[tuple[int, int]]:
        """Return the half-open address ranges of an entry."""
        if RANGES in entry.values:
            form, value = entry.values[RANGES]
            return self._list(form, value) if isinstance(value, int) else []
        low = self._address(entry)
        form, high = entry.values.get(HIGH_PC, (0, None))
        if low is None or not isinstance(high, int):
            return []
        return [(low, high if form in ADDRESS_FORMS else low + high)]

    def _list(self, form: int, value: int) -> list[tuple[int, int]]:
        if self._version < 5:
            return self._old_list(value)
        data = self._sections.get(".debug_rnglists", b"")
        if form == 0x23:
            value = self._lists + Reader(data, self._lists + 4 * value).number(4)
        return list(self._new_list(Reader(data, value)))

    def _old_list(self, at: int) -> list[tuple[int, int]]:
        reader, base, found = Reader(self._sections.get(".debug_ranges", b""), at), self._base, list[tuple[int, int]]()
        while True:
            low, high = reader.number(8), reader.number(8)
            if not low and not high:
                return found
            if low == (1 << 64) - 1:
                base = high
            else:
                found.append((base + low, base + high))

    def _new_list(self, reader: Reader) -> Iterator[tuple[int, int]]:
        base = self._base
        while kind := reader.number(1):
            if kind == 1:
                base = self._indexed(reader.leb())
            elif kind == 5:
                base = reader.number(8)
            elif kind == 2:
                low = self._indexed(reader.leb())
                yield low, self._indexed(reader.leb())
            elif kind == 3:
                low = self._indexed(reader.leb())
                yield low, low + reader.leb()
            elif kind == 4:
                low, high = reader.leb(), reader.leb()
                yield base + low, base + high
            elif kind == 6:
                low = reader.number(8)
                yield low, reader.number(8)
            elif kind == 7:
                low = reader.number(8)
                yield low, low + reader.leb()
            else:
                return
