"""Runs the engines of benchmarks/peers.py side by side: a process each, and never two of them at work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_engines import Setup
from peer_record import Context, Model, Row, Sample, Status, Workload, compared, context_of, medians

WORKER = Path(__file__).resolve().parent / "peer_worker.py"
SETTLE_SECONDS = 0.2  # threads of the engine before wait for work a while before they sleep
POOLS = ("METILE_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
INSTALL = {"llama_cpp": "llama-cpp-python", "torch": "torch", "transformers": "transformers"}

Tell = Callable[[str], None]


class PeerError(Exception):
    """An engine that cannot answer: why, and the module it lacks if that is it."""

    def __init__(self, reason: str, missing: str | None = None) -> None:
        super().__init__(reason)
        self.missing = missing


class Worker:
    """A process that answers requests, a JSON line each.

    Args:
        command: what to start.
        threads: how many its libraries are told to use.
    """

    def __init__(self, command: Sequence[str], threads: int) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | dict.fromkeys(POOLS, str(threads)),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._noise: deque[str] = deque(maxlen=20)
        self._readers = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._listen, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")

    def _listen(self) -> None:
        self._noise.extend(self._process.stderr or ())

    def ask(self, request: Mapping[str, Any], limit_seconds: float) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            PeerError: the answer is an error or none in time, or the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._lines.get(timeout=limit_seconds)
        except queue.Empty:
            raise PeerError(f"no answer to {request['do']!r} within {limit_seconds:g} s") from None
        except OSError:  # a pipe whose reader is gone
            line = ""
        if not line:
            raise PeerError(self._last_words())
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise PeerError(f"the process wrote {line.strip()!r}, which is no answer") from None
        if "error" in answer:
            raise PeerError(answer["error"], answer.get("missing"))
        return answer

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:  # it closed its pipes and lives on
            return "the process closed its pipes"
        self._readers[1].join(timeout=5)
        said = [line.strip() for line in self._noise if line.strip()]
        return f"the process ended with code {code}{': ' + said[-1] if said else ''}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=5)  # a child of the process may hold its pipes open
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            with contextlib.suppress(OSError):  # what was not written is for nobody
                if stream is not None:
                    stream.close()


@dataclass(frozen=True)
class Spec:
    """An engine to run: its name in the table, how it holds the weights, what it is given, and what to start."""

    name: str
    weights: str
    setup: Setup
    command: tuple[str, ...]

    @classmethod
    def of(cls, name: str, weights: str, setup: Setup) -> Spec:
        """Return the spec of an engine of peer_engines.py, whose name may be followed by more."""
        return cls(name, weights, setup, (sys.executable, str(WORKER), name.split()[0]))


@dataclass
class Peer:
    """An engine while it is measured; after an error it is asked nothing more."""

    spec: Spec
    limit_seconds: float
    worker: Worker | None = None
    error: PeerError | None = None
    loaded: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_rss_bytes: int | None = None
    fill_seconds: float | None = None
    decoded: list[float] = field(default_factory=list)

    def ask(self, wanted: str, **request: Any) -> dict[str, Any] | None:
        """Return an answer, or None where there is none."""
        if self.error is not None:
            return None
        try:
            if self.worker is None:
                self.worker = Worker(self.spec.command, self.spec.setup.threads)
            return self.worker.ask({"do": wanted, **request}, self.limit_seconds)
        except (PeerError, OSError) as error:
            self.error = error if isinstance(error, PeerError) else PeerError(str(error))
            self.close()
            return None

    def load(self, prompt: Sequence[int]) -> None:
        """Load the model and run it once, untimed."""
        self.loaded = self.ask("load", **dataclasses.asdict(self.spec.setup)) or {}
        self.ask("warm", prompt=list(prompt))

    def generate(self, prompt: Sequence[int], count: int) -> None:
        """Take a sample."""
        answer = self.ask("generate", prompt=list(prompt), count=count)
        if answer is None:
            return
        self.samples.append(
            Sample(
                prefill_tokens_per_second=answer["prefill_tokens"] / answer["prefill_seconds"],
                decode_tokens_per_second=(count - 1) / answer["decode_seconds"],
                time_to_first_token_seconds=answer["first_seconds"],
            )
        )
        self.tokens = self.tokens or answer["tokens"]
        self.peak_rss_bytes = answer["peak_rss_bytes"]

    def fill(self, prompt: Sequence[int]) -> None:
        """Bring a long prompt into the cache."""
        answer = self.ask("fill", prompt=list(prompt))
        self.fill_seconds = answer["seconds"] if answer else None

    def extend(self, count: int) -> None:
        """Take a sample of decoding after the long prompt."""
        answer = self.ask("extend", count=count)
        if answer is not None:
            self.decoded.append((count - 1) / answer["decode_seconds"])

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def row(self, work: Workload, model: Model) -> Row:
        """Return what was measured, or why nothing was."""
        missing = self.error.missing if self.error else None
        package = INSTALL.get(missing or "", missing)
        status: Status = "measured" if self.error is None else "not installed" if missing else "failed"
        return Row(
            engine=self.spec.name,
            precision=model.precision,
            weights=self.spec.weights,
            status=status,
            reason=f"{self.error} (pip install {package})" if missing else str(self.error or ""),
            details=self.loaded.get("details", {}),
            load_seconds=self.loaded.get("seconds"),
            samples=self.samples,
            medians=medians(self.samples),
            peak_rss_bytes=self.peak_rss_bytes,
            over_plain=None,
            metile_over=None,
            tokens=self.tokens,
            first_difference=None,
            context=self._context(work, model),
        )

    def _context(self, work: Workload, model: Model) -> Context | None:
        short = medians(self.samples)
        if work.context is None or self.fill_seconds is None or not self.decoded or short is None:
            return None
        return context_of(work.context, self.fill_seconds, self.decoded, short, work, model)


def rotated(peers: Sequence[Peer], rounds: int) -> Iterator[tuple[int, Peer]]:
    """Yield each round's number and peers, every round beginning with another one."""
    for number in range(rounds):
        first = number % len(peers)
        for peer in (*peers[first:], *peers[:first]):
            time.sleep(SETTLE_SECONDS)
            yield number, peer


def measure(
    specs: Sequence[Spec],
    work: Workload,
    model: Model,
    prompts: tuple[Sequence[int], Sequence[int]],
    limit_seconds: float,
    tell: Tell,
) -> list[Row]:
    """Measure engines of one precision, each in its process.

    Args:
        specs: the engines, plain MLX among them or not.
        work: lengths and rounds.
        model: its bytes, and the precision's name.
        prompts: the prompt, and the long one, empty where `work` has no context.
        limit_seconds: for each answer; an engine that takes longer has failed.
        tell: is told what runs now.

    Returns:
        A row an engine, in order, also for one that is not installed or fails.
    """
    peers = [Peer(spec, limit_seconds) for spec in specs]
    prompt, long_prompt = prompts
    try:
        for peer in peers:
            tell(f"{model.precision}: {peer.spec.name} loads")
            peer.load(prompt)
        for number, peer in rotated(peers, work.rounds):
            if peer.spec.name == "mlx" and number >= work.plain_rounds:
                continue
            tell(f"{model.precision}: round {number + 1} of {work.rounds}, {peer.spec.name}")
            peer.generate(prompt, work.generation_tokens)
        if work.context is not None:
            for peer in peers:
                tell(f"{model.precision}: {peer.spec.name} reads {work.context} tokens")
                peer.fill(long_prompt)
            for number, peer in rotated(peers, work.rounds):
                tell(f"{model.precision}: after {work.context} tokens, round {number + 1}, {peer.spec.name}")
                peer.extend(work.generation_tokens)
        return compared([peer.row(work, model) for peer in peers])
    finally:
        for peer in peers:
            peer.close()
