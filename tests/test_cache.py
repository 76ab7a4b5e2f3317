"""The plan cache: what was decided comes back, and nothing else ever does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from metile import cache as cache_module
from metile.cache import CacheWarning, EntryKey, MachineKey, PlanCache, kernels_digest, model_digest
from metile.errors import MetileError

HERE = MachineKey("cpu", "Xeon", "threads=2", "Linux 6.1", "0.32.4", "0.1.0", "abc")
THERE = replace(HERE, chip="Apple M5", target="metal")
MODEL = "0123456789abcdef"

# Writes entries w<id>-0, w<id>-1, … one by one; with a count below zero, until it is killed.
WRITER = """
import itertools, sys
from pathlib import Path
from metile.cache import EntryKey, MachineKey, PlanCache
root, name, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
machine = MachineKey("cpu", "Xeon", "threads=2", "Linux 6.1", "0.32.4", "0.1.0", "abc")
cache = PlanCache("0123456789abcdef", root, lock_seconds=60)
print("ready", flush=True)
for number in itertools.count() if count < 0 else range(count):
    key = EntryKey(machine, "0123456789abcdef", "dispatch", f"w{name}-{number % 200}")
    cache.put(key, {"writer": name, "number": number, "padding": "x" * 200})
"""


@pytest.fixture(autouse=True)
def _warn_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see its own first warning, which is otherwise given once a process."""
    monkeypatch.setattr(cache_module, "_warned", set())


@contextmanager
def one_warning(match: str) -> Iterator[None]:
    """Expect exactly one warning, however often the block asks."""
    with pytest.warns(CacheWarning, match=match) as caught:
        yield
    assert len(caught) == 1


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def key(subject: str = "dense_swiglu rows=128", *, machine: MachineKey = HERE, kind: str = "dispatch") -> EntryKey:
    return EntryKey(machine, MODEL, kind, subject, "prompt=128 generate=64" if kind == "plan" else "")


def record(subject: str = "dense_swiglu rows=128", **changes: object) -> dict[str, object]:
    plain = {"machine": vars(HERE), "model": MODEL, "kind": "dispatch", "subject": subject, "workload": ""}
    return {**plain, "value": 1, **changes}


def document(*records: object, **changes: object) -> bytes:
    return json.dumps({"schema": 1, "model": MODEL, "entries": list(records), **changes}).encode()


def start_writer(root: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(root), name, str(count)]
    repository = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": repository}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.usefixtures("no_warning")
def test_an_entry_comes_back_in_another_cache_object(tmp_path: Path) -> None:
    first = PlanCache(MODEL, tmp_path)
    assert first.get(key()) is None
    first.put(key(), {"bm": 64, "bn": [1, 2.5, None, True]})
    first.put_many({key("norm rows=1"): "mlx", key("all", kind="plan"): {"dense_mlp": True}})
    second = PlanCache(MODEL, tmp_path)
    assert second.get(key()) == {"bm": 64, "bn": [1, 2.5, None, True]}
    assert [entry.key.subject for entry in second.entries()] == [
        "dense_swiglu rows=128",
        "norm rows=1",
        "all",
    ]
    first.put(key(), "mlx")  # the second sees what the first writes later
    assert second.get(key()) == "mlx"


def test_the_file_shows_every_field_of_the_key(tmp_path: Path) -> None:
    PlanCache(MODEL, tmp_path).put(key(), {"bm": 64})
    content = json.loads((tmp_path / f"{MODEL}.json").read_text())
    assert content == {"schema": 1, "model": MODEL, "entries": [record(value={"bm": 64})]}


def test_the_default_folder_is_under_the_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METILE_CACHE_DIR", str(tmp_path))
    assert PlanCache(MODEL).path == tmp_path / "plans" / f"{MODEL}.json"


@pytest.mark.parametrize("field", ["chip", "limits", "os", "mlx", "metile", "kernels"])
def test_any_other_machine_is_a_warning_and_a_miss_and_stays_in_the_file(tmp_path: Path, field: str) -> None:
    other = replace(HERE, **{field: "something else"})
    PlanCache(MODEL, tmp_path).put(key(machine=other), "theirs")
    cache = PlanCache(MODEL, tmp_path)
    with one_warning(f"another machine.*{field}: 'something else'"):
        assert cache.get(key()) is None
        assert cache.get(key()) is None
    cache.put(key(), "ours")
    assert cache.get(key()) == "ours"
    assert {entry.value for entry in PlanCache(MODEL, tmp_path).entries()} == {"ours", "theirs"}


@pytest.mark.usefixtures("no_warning")
@pytest.mark.parametrize("change", [{"subject": "other"}, {"kind": "plan"}, {"workload": "prompt=1"}])
def test_another_question_is_a_plain_miss(tmp_path: Path, change: dict[str, str]) -> None:
    cache = PlanCache(MODEL, tmp_path)
    cache.put(key(), "ours")
    assert cache.get(replace(key(), **change)) is None


@pytest.mark.usefixtures("no_warning")
def test_another_target_of_this_machine_is_a_plain_miss_and_stays_in_the_file(tmp_path: Path) -> None:
    PlanCache(MODEL, tmp_path).put(key(machine=replace(HERE, target="another")), "theirs")
    cache = PlanCache(MODEL, tmp_path)
    assert cache.get(key()) is None
    cache.put(key(), "ours")
    assert {entry.value for entry in PlanCache(MODEL, tmp_path).entries()} == {"ours", "theirs"}


UNUSABLE = {
    "empty": b"",
    "blank": b"\n \n",
    "cut off": b'{"plans":[',
    "cut off later": document(record())[:-10],
    "bad UTF-8": b'{"schema": 1, "model": "\xff\xfe"}',
    "older schema": document(record(), schema=0),
    "newer schema": document(record(), schema=2),
    "schema of another type": document(record(), schema=True),
    "no schema": b'{"plans": []}',
    "a list": b"[1, 2]",
    "a number": b"7",
    "NaN": document(record(value=float("nan"))),
    "another model": document(record(), model="feedface"),
    "entries of another shape": document(entries={"a": 1}),
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("raw", UNUSABLE.values(), ids=UNUSABLE.keys())
def test_an_unusable_file_is_one_warning_a_miss_and_kept_aside(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / f"{MODEL}.json"
    path.write_bytes(raw)
    with one_warning(str(path)):
        for cache in (PlanCache(MODEL, tmp_path), PlanCache(MODEL, tmp_path)):
            assert cache.get(key()) is None
            assert cache.entries() == []
    assert path.read_bytes() == raw, "reading must not change the file"
    cache.put(key(), "new")
    assert PlanCache(MODEL, tmp_path).get(key()) == "new"
    assert (tmp_path / f"{path.name}.corrupt-1").read_bytes() == raw
    path.write_bytes(b"again")
    cache.put(key(), "newer")
    assert (tmp_path / f"{path.name}.corrupt-2").read_bytes() == b"again"


def test_an_unusable_file_survives_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"{MODEL}.json"
    path.write_bytes(b"damaged")
    monkeypatch.setattr(cache_module, "write_atomic", disk_full)
    with pytest.warns(CacheWarning):
        PlanCache(MODEL, tmp_path).put(key(), 1)
    assert [file.name for file in tmp_path.glob("*.json*") if file.suffix != ".lock"] == [path.name]
    assert path.read_bytes() == b"damaged"


BAD_RECORDS = {
    "no object": 7,
    "a field missing": {name: value for name, value in record("bad").items() if name != "workload"},
    "a field too many": record("bad", extra=1),
    "null value": record("bad", value=None),
    "unknown kind": record("bad", kind="guess"),
    "subject no string": record(subject="bad") | {"subject": ["bad"]},
    "subject unprintable": record("bad\n"),
    "machine no object": record("bad", machine="cpu"),
    "machine field missing": record("bad", machine={"target": "cpu"}),
    "machine field unhashable": record("bad", machine={**vars(HERE), "chip": []}),
    "another model": record("bad", model="feedface"),
}


@pytest.mark.parametrize("bad", BAD_RECORDS.values(), ids=BAD_RECORDS.keys())
def test_a_bad_record_is_dropped_alone(tmp_path: Path, bad: object) -> None:
    (tmp_path / f"{MODEL}.json").write_bytes(document(record("one"), bad, record("two")))
    cache = PlanCache(MODEL, tmp_path)
    with one_warning("1 damaged of 3"):
        assert cache.get(key("one")) == 1
        assert cache.get(key("two")) == 1
        assert len(cache.entries()) == 2


@pytest.mark.usefixtures("no_warning")
def test_four_processes_lose_nothing(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, str(number), 50) for number in range(4)]
    for writer in writers:
        writer.communicate(timeout=120)
        assert writer.returncode == 0
    subjects = {entry.key.subject for entry in PlanCache(MODEL, tmp_path).entries()}
    assert subjects == {f"w{writer}-{number}" for writer in range(4) for number in range(50)}


@pytest.mark.usefixtures("no_warning")
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_writer_leaves_a_whole_file_and_no_lock(tmp_path: Path) -> None:
    cache = PlanCache(MODEL, tmp_path)
    cache.put(key("before"), 1)
    count = 1
    for attempt in range(8):
        writer = start_writer(tmp_path, "k", -1)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(0.05 + 0.013 * attempt)  # another moment of the write each time
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
        entries = PlanCache(MODEL, tmp_path).entries()
        assert len(entries) >= count, "an entry that was there is lost"
        count = len(entries)
    assert count > 1, "the writers never got to write"
    cache.put(key("after"), 2)
    assert cache.get(key("before")) == 1
    assert not list(tmp_path.glob(".*")), "temporaries of killed writers are cleared away"
    assert not list(tmp_path.glob("*.corrupt-*"))


def disk_full(path: Path, data: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_cannot_be_made_keeps_plans_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = PlanCache(MODEL, tmp_path / "file" / "plans")
    with one_warning("cannot be written"):
        cache.put(key("one"), 1)
        cache.put(key("two"), 2)
    assert [entry.value for entry in cache.entries()] == [1, 2]
    assert cache.get(key("two")) == 2


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder_keeps_plans_in_memory(tmp_path: Path) -> None:
    PlanCache(MODEL, tmp_path).put(key("kept"), 0)
    tmp_path.chmod(0o500)
    try:
        cache = PlanCache(MODEL, tmp_path)
        with one_warning("cannot be written"):
            cache.put(key("new"), 1)
        assert [entry.value for entry in cache.entries()] == [0, 1]
    finally:
        tmp_path.chmod(0o700)


def test_what_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PlanCache(MODEL, tmp_path)
    cache.put(key("old"), 0)
    with monkeypatch.context() as patched, one_warning("No space left"):
        patched.setattr(cache_module, "write_atomic", disk_full)
        cache.clear()
        cache.put(key("one"), 1)
    assert [entry.value for entry in cache.entries()] == [1], "cleared entries are hidden"
    assert cache.get(key("old")) is None
    assert PlanCache(MODEL, tmp_path).get(key("old")) == 0, "and still on disk"
    cache.put(key("two"), 2)
    assert [entry.value for entry in PlanCache(MODEL, tmp_path).entries()] == [1, 2]


def test_a_lock_that_stays_taken_is_waited_for_once(tmp_path: Path) -> None:
    cache = PlanCache(MODEL, tmp_path, lock_seconds=0.1)
    with FileLock(f"{cache.path}.lock"), one_warning("locked"):
        cache.put(key("one"), 1)
        assert cache._lock_seconds == 0.0
        cache.put(key("two"), 2)
        assert cache.get(key("one")) == 1
        assert not cache.path.exists()
    cache.put(key("three"), 3)
    assert len(PlanCache(MODEL, tmp_path).entries()) == 3


@pytest.mark.usefixtures("no_warning")
def test_clear_forgets_one_machine_or_all(tmp_path: Path) -> None:
    cache = PlanCache(MODEL, tmp_path)
    cache.put_many({key("a"): 1, key("b"): 2, key("c", machine=THERE): 3})
    cache.clear(HERE)
    assert [entry.value for entry in PlanCache(MODEL, tmp_path).entries()] == [3]
    cache.clear()
    assert PlanCache(MODEL, tmp_path).entries() == []
    cache.put(key("a"), 4)
    assert PlanCache(MODEL, tmp_path).get(key("a")) == 4


@pytest.mark.usefixtures("no_warning")
def test_values_are_not_shared_with_the_caller(tmp_path: Path) -> None:
    cache = PlanCache(MODEL, tmp_path)
    cache.put(key(), {"list": [1]})
    value = cache.get(key())
    assert isinstance(value, dict)
    value["list"] = "changed"
    assert cache.get(key()) == {"list": [1]}


@pytest.mark.parametrize(
    "value", [None, float("nan"), float("inf"), {1, 2}, object(), {"a": Path()}], ids=lambda value: type(value).__name__
)
def test_a_value_that_json_cannot_hold_is_refused(tmp_path: Path, value: object) -> None:
    cache = PlanCache(MODEL, tmp_path)
    with pytest.raises(MetileError, match=r"\[plan cache\] expected"):
        cache.put_many({key("good"): 1, key("bad"): value})  # type: ignore[dict-item]
    assert cache.entries() == []


def test_bad_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MetileError, match="kind"):
        replace(key(), kind="guess")
    with pytest.raises(MetileError, match="printable"):
        replace(HERE, chip="two\nlines")
    with pytest.raises(MetileError, match="a key of model"):
        PlanCache(MODEL, tmp_path).get(replace(key(), model="feedface"))
    with pytest.raises(MetileError, match="digest"):
        PlanCache("../elsewhere", tmp_path)


printable = st.text(st.characters(exclude_categories=("C", "Z")), max_size=20)
leaves = st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(subject=printable, chip=printable, value=values)
def test_any_printable_key_and_json_value_come_back(tmp_path: Path, subject: str, chip: str, value: object) -> None:
    asked = key(subject, machine=replace(HERE, chip=chip))
    PlanCache(MODEL, tmp_path).put(asked, value)  # type: ignore[arg-type]
    assert PlanCache(MODEL, tmp_path).get(asked) == value


def test_digests_tell_keys_apart() -> None:
    keys = [key(), key("other"), key(machine=THERE), key(kind="plan"), replace(key(), workload="w")]
    assert len({each.digest() for each in keys}) == len(keys)
    assert key().digest() == key().digest()


def test_model_digest_follows_configuration_and_weight_format() -> None:
    weights = [("a.weight", (4, 8), "bfloat16"), ("b.weight", (8,), "float32")]
    base = model_digest({"hidden_size": 8, "labels": {0: "x"}}, weights)
    assert model_digest({"labels": {"0": "x"}, "hidden_size": 8}, reversed(weights)) == base
    assert model_digest({"hidden_size": 9, "labels": {0: "x"}}, weights) != base
    assert model_digest({"hidden_size": 8, "labels": {0: "x"}}, [*weights[:1], ("b.weight", (8,), "float16")]) != base
    with pytest.raises(MetileError, match="JSON"):
        model_digest({"dtype": object()}, weights)


def test_kernels_digest_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "tile").mkdir()
    (tmp_path / "linear.metal").write_text("a")
    (tmp_path / "tile" / "cpu.h").write_text("b")
    base = kernels_digest(tmp_path)
    (tmp_path / ".DS_Store").write_text("ignored")
    assert kernels_digest(tmp_path) == base
    (tmp_path / "tile" / "cpu.h").write_text("c")
    changed = kernels_digest(tmp_path)
    (tmp_path / "tile" / "cpu.h").rename(tmp_path / "cpu.h")
    assert len({base, changed, kernels_digest(tmp_path)}) == 3
    with pytest.raises(MetileError, match="folder"):
        kernels_digest(tmp_path / "missing")
