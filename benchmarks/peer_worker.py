"""A process of one engine, as benchmarks/peers.py starts it: a JSON request a line comes in, a JSON answer goes out."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from peer_engines import ENGINES, Engine, Setup, Timed, peak_bytes

Make = Callable[[Setup], Engine]


class Server:
    """Answers the requests ``load``, ``generate``, ``fill`` and ``extend``.

    Args:
        make: the engine of a setup.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._engine: Engine | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a request asks for, or the error that it ends in, and whose package is missing if that is it."""
        try:
            return self._done(dict(request))
        except ModuleNotFoundError as error:
            return {"error": str(error), "missing": error.name}
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "missing": None}

    def _done(self, request: dict[str, Any]) -> dict[str, Any]:
        wanted, start = request.pop("do"), time.perf_counter()
        if wanted == "load":
            engine = self._make(Setup(**request))
            details = dict(engine.load())
            self._engine = engine
            return {"details": details, **_spent(start)}
        if self._engine is None:
            raise RuntimeError("nothing is loaded")
        if wanted == "fill":
            self._engine.fill(request["prompt"])
            return _spent(start)
        if wanted == "warm":
            prompt = request["prompt"][: self._engine.warm_tokens]
            self._engine.generate(prompt, 4)
            return _spent(start)
        runs: dict[str, Callable[..., Timed]] = {"generate": self._engine.generate, "extend": self._engine.extend}
        return dataclasses.asdict(runs[wanted](**request)) | {"peak_rss_bytes": peak_bytes()}

    def serve(self, requests: TextIO, answers: TextIO) -> None:
        """Answer until the requests end."""
        for line in requests:
            answers.write(json.dumps(self.answer(json.loads(line))) + "\n")
            answers.flush()


def _spent(start: float) -> dict[str, Any]:
    return {"seconds": time.perf_counter() - start, "peak_rss_bytes": peak_bytes()}


def main(name: str) -> None:
    """Serve an engine. What it prints goes to stderr: stdout is for answers alone."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    Server(ENGINES[name]).serve(sys.stdin, answers)


if __name__ == "__main__":
    main(sys.argv[1])
