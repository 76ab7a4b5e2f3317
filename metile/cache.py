"""The plan cache: one readable JSON file a model, shared by processes and never trusted blindly.

A file that is damaged, of another schema or of another machine costs one warning and a miss. It is never
adopted and never a crash, and a folder that cannot be written only means that tuning stays in memory.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from filelock import FileLock, Timeout

from metile.errors import mismatch
from metile.files import cache_root, write_atomic

SCHEMA = 1
KINDS = ("dispatch", "plan")

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


class CacheWarning(UserWarning):
    """A plan file that could not be used, or not be written; work goes on without it."""


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _check_printable(op: str, values: Mapping[str, object]) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or not value.isprintable():
            raise mismatch(op, f"{name} to be a printable string", repr(value))


@dataclass(frozen=True)
class MachineKey:
    """Where a decision holds; any difference makes it foreign.

    Attributes:
        target: ``metal``, ``cuda`` or ``cpu``.
        chip: The device's own name.
        limits: The device's limits, printed or digested.
        os: Operating system and its version.
        mlx: Version of MLX, which is the baseline of every decision.
        metile: Version of this package.
        kernels: Digest of the kernel sources, from `kernels_digest`.
    """

    target: str
    chip: str
    limits: str
    os: str
    mlx: str
    metile: str
    kernels: str

    def __post_init__(self) -> None:
        """Refuse a field that a person could not read in the file."""
        _check_printable("machine key", {field.name: getattr(self, field.name) for field in fields(self)})

    def differences(self, other: MachineKey) -> list[str]:
        """Return ``field: 'theirs' instead of 'ours'`` for each field in which `other` differs."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name}: {theirs[name]!r} instead of {ours[name]!r}" for name in ours if ours[name] != theirs[name]]


@dataclass(frozen=True)
class EntryKey:
    """What was decided, for which model, on which machine.

    Attributes:
        machine: Where the decision holds.
        model: Digest of the model's configuration and weight format, from `model_digest`.
        kind: ``dispatch`` (one op in one shape bucket) or ``plan`` (features of the whole model).
        subject: The op and its bucket, such as ``dense_swiglu rows=128 n=1536 k=576 dtype=bfloat16``.
        workload: The workload that a plan was confirmed on; empty for a dispatch.
    """

    machine: MachineKey
    model: str
    kind: str
    subject: str
    workload: str = ""

    def __post_init__(self) -> None:
        """Refuse an unknown kind or a field that a person could not read in the file."""
        _check_printable("entry key", {name: getattr(self, name) for name in _TEXT_FIELDS})
        if self.kind not in KINDS:
            raise mismatch("entry key", f"kind to be one of {', '.join(KINDS)}", repr(self.kind))

    def digest(self) -> str:
        """Return a short name for the key; the cache itself always compares the fields."""
        return _digest(asdict(self))


_TEXT_FIELDS = ("model", "kind", "subject", "workload")
_RECORD_FIELDS = {"machine", *_TEXT_FIELDS, "value"}


class Entry(NamedTuple):
    """One stored decision."""

    key: EntryKey
    value: JsonValue


def model_digest(config: Mapping[str, Any], weights: Iterable[tuple[str, tuple[int, ...], str]]) -> str:
    """Digest a model's configuration and weight format; the weights' values play no part.

    Args:
        config: The model's configuration, as its JSON file holds it.
        weights: Name, shape and dtype of each parameter, in any order.
    """
    try:
        plain = json.loads(json.dumps(config))
    except (TypeError, ValueError) as error:
        raise mismatch("model digest", "a configuration of JSON values", error) from error
    return _digest([plain, sorted([name, list(shape), dtype] for name, shape, dtype in weights)])


def kernels_digest(folder: Path) -> str:
    """Digest names and contents of all files under `folder`, leaving out hidden ones.

    Raises:
        MetileError: `folder` is no folder.
    """
    if not folder.is_dir():
        raise mismatch("kernels digest", "a folder of kernel sources", folder)
    named = sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*") if path.is_file())
    visible = [(name, path) for name, path in named if not any(part.startswith(".") for part in name.split("/"))]
    return _digest([[name, hashlib.sha256(path.read_bytes()).hexdigest()] for name, path in visible])


class _UnusableError(Exception):
    """The content of a plan file, as a whole, cannot be used."""


class _Content(NamedTuple):
    """What a plan file held: its good records, or why the file as a whole is unusable."""

    entries: dict[EntryKey, JsonValue]
    complaint: str = ""
    unusable: bool = False


class PlanCache:
    """The decisions kept for one model.

    Several processes may share a file: each write merges what the others wrote meanwhile. Entries of another
    machine stay in the file and are never returned. An instance belongs to one thread.

    Args:
        model: Digest of the model, from `model_digest`; it names the file.
        root: Folder of the plan files; ``plans`` under the user cache directory if not given.
        lock_seconds: How long to wait for another process that is writing.
    """

    def __init__(self, model: str, root: Path | None = None, *, lock_seconds: float = 10.0) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", model):
            raise mismatch("plan cache", "a digest as the model's name", repr(model))
        self.model = model
        self.path = (cache_root() / "plans" if root is None else root) / f"{model}.json"
        self._lock_seconds = lock_seconds
        self._unwritten: dict[EntryKey, JsonValue] = {}
        self._removed: set[EntryKey] = set()
        self._seen: tuple[tuple[int, int, int], _Content] | None = None

    def get(self, key: EntryKey) -> JsonValue | None:
        """Return the value stored under exactly `key`, or None."""
        self._check(key)
        if key in self._unwritten:
            return copy.deepcopy(self._unwritten[key])
        stored = self._read()
        if key in stored and key not in self._removed:
            return copy.deepcopy(stored[key])
        self._warn_of_other_machines(key, stored)
        return None

    def put(self, key: EntryKey, value: JsonValue) -> None:
        """Store `value`, which may be anything JSON holds except null."""
        self.put_many({key: value})

    def put_many(self, values: Mapping[EntryKey, JsonValue]) -> None:
        """Store several values in one write.

        Raises:
            MetileError: a key of another model, or a value that JSON cannot hold; nothing is stored then.
        """
        for key in values:
            self._check(key)
        self._unwritten.update({key: _as_json(value) for key, value in values.items()})
        self._commit()

    def entries(self) -> list[Entry]:
        """Return every entry, those of other machines included, in the order of the file."""
        stored = {key: value for key, value in self._read().items() if key not in self._removed}
        return [Entry(key, copy.deepcopy(value)) for key, value in _in_order(stored | self._unwritten)]

    def clear(self, machine: MachineKey | None = None) -> None:
        """Forget the entries of `machine`, or all of them; hide them if the file can't be written."""
        doomed = [key for key in self._read() if machine is None or key.machine == machine]
        self._removed.update(doomed)
        self._unwritten = {
            key: value for key, value in self._unwritten.items() if machine is not None and key.machine != machine
        }
        if doomed or self._unwritten:
            self._commit()

    def _check(self, key: EntryKey) -> None:
        if key.model != self.model:
            raise mismatch("plan cache", f"a key of model {self.model}", key.model)

    def _read(self) -> dict[EntryKey, JsonValue]:
        """Return the good records of the file, parsing it again only when it was replaced."""
        try:
            stat = self.path.stat()
            signature = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if self._seen is None or self._seen[0] != signature:
                self._seen = (signature, _parse(self.path.read_bytes(), self.model))
            content = self._seen[1]
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            content = _Content({}, f"cannot be read ({error})")
        if content.complaint:
            _warn_once(self.path, "read", content.complaint)
        return content.entries

    def _commit(self) -> None:
        """Write what is unwritten, merged with the file as it is now; on failure keep it in memory."""
        lock = FileLock(f"{self.path}.lock")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock.acquire(timeout=self._lock_seconds):
                self._merge_and_write()
        except Timeout:
            self._lock_seconds = 0.0  # try again at the next entry, but wait only once
            _warn_once(self.path, "write", "stays locked by another process; this run's plans stay in memory")
        except (OSError, NotImplementedError) as error:
            _warn_once(self.path, "write", f"cannot be written ({error}); this run's plans stay in memory")
        else:
            self._unwritten.clear()
            self._removed.clear()

    def _merge_and_write(self) -> None:
        """Replace the file; the caller holds its lock."""
        for leftover in self.path.parent.glob(f".{self.path.name}.*"):  # of a writer that was killed
            leftover.unlink(missing_ok=True)
        try:
            content = _parse(self.path.read_bytes(), self.model)
        except FileNotFoundError:
            content = _Content({})
        if content.complaint:
            _warn_once(self.path, "read", content.complaint)
        kept = {key: value for key, value in content.entries.items() if key not in self._removed}
        data = _render(self.model, kept | self._unwritten)
        if content.unusable:
            _replace_keeping_old(self.path, data)
        else:
            write_atomic(self.path, data)

    def _warn_of_other_machines(self, key: EntryKey, stored: Mapping[EntryKey, JsonValue]) -> None:
        """Say so when the very thing asked for is there, decided elsewhere; on another target it is no surprise."""
        asked = [getattr(key, name) for name in _TEXT_FIELDS]
        for other in stored:
            if other.machine.target != key.machine.target:
                continue
            if other not in self._removed and [getattr(other, name) for name in _TEXT_FIELDS] == asked:
                differences = "; ".join(key.machine.differences(other.machine))
                _warn_once(self.path, "read", f"holds plans of another machine, which are not used ({differences})")
                return


_warned: set[tuple[Path, str]] = set()


def _warn_once(path: Path, kind: str, message: str) -> None:
    """Warn at most once a process about reading, and once about writing, each file."""
    if (path, kind) not in _warned:
        _warned.add((path, kind))
        warnings.warn(f"plan file {path} {message}", CacheWarning, stacklevel=4)


def _as_json(value: object) -> JsonValue:
    """Return `value` as it would come back from the file."""
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise mismatch("plan cache", "a JSON value", f"{value!r} ({error})") from error
    if plain is None:
        raise mismatch("plan cache", "a value other than null, which would read as a miss", value)
    return cast(JsonValue, plain)


def _in_order(entries: Mapping[EntryKey, JsonValue]) -> list[tuple[EntryKey, JsonValue]]:
    def place(item: tuple[EntryKey, JsonValue]) -> tuple[str, ...]:
        key = item[0]
        return (key.kind, key.subject, key.workload, *asdict(key.machine).values())

    return sorted(entries.items(), key=place)


def _render(model: str, entries: Mapping[EntryKey, JsonValue]) -> bytes:
    records = [{**asdict(key), "value": value} for key, value in _in_order(entries)]
    document = {"schema": SCHEMA, "model": model, "entries": records}
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _parse(raw: bytes, model: str) -> _Content:
    """Read a plan file, dropping bad records one by one."""
    try:
        records = _records(raw, model)
    except _UnusableError as error:
        return _Content({}, f"{error}; it is not used", unusable=True)
    entries: dict[EntryKey, JsonValue] = {}
    dropped = 0
    for record in records:
        try:
            key = _record_key(record, model)
        except (ValueError, TypeError, KeyError):
            dropped += 1
        else:
            entries[key] = record["value"]
    return _Content(entries, f"has {dropped} damaged of {len(records)} entries, left out" if dropped else "")


def _records(raw: bytes, model: str) -> list[Any]:
    """Return the undecoded records, or raise `_UnusableError` saying what is wrong with the file."""
    if not raw.strip():
        raise _UnusableError("is empty")
    try:
        document = json.loads(raw.decode(), parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise _UnusableError(f"is damaged ({error})") from error
    if not isinstance(document, dict) or "schema" not in document:
        raise _UnusableError("is not a plan file")
    if type(document["schema"]) is not int or document["schema"] != SCHEMA:
        raise _UnusableError(f"has schema {document['schema']!r} instead of {SCHEMA}")
    if document.get("model") != model:
        raise _UnusableError(f"is of another model ({document.get('model')!r})")
    records = document.get("entries")
    if not isinstance(records, list):
        raise _UnusableError("has no list of entries")
    return records


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _record_key(record: Any, model: str) -> EntryKey:
    """Return the key of one record, or raise for one that is not exactly as this version writes it."""
    if not isinstance(record, dict) or record.keys() != _RECORD_FIELDS or record["value"] is None:
        raise ValueError("not a record")
    if record["model"] != model or not isinstance(record["machine"], dict):
        raise ValueError("not a record of this model")
    return EntryKey(MachineKey(**record["machine"]), **{name: record[name] for name in _TEXT_FIELDS})


def _replace_keeping_old(path: Path, data: bytes) -> None:
    """Write `path` anew and leave its old, unusable content beside it under the first free name."""
    number = 1
    while (aside := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    path.rename(aside)
    try:
        write_atomic(path, data)
    except BaseException:
        aside.rename(path)
        raise
