"""The engines that benchmarks/peers.py compares: each loads the same numbers and generates greedily from token ids.

What is timed is what a user of the engine calls, without a sampler: `generate_step` of mlx-lm (whose prefill is the
prompt but its last token), ``llama_decode`` of llama.cpp and a forward pass of transformers (whose prefill is the whole
prompt and ends with the first token). A peer's package is imported when its engine loads, and by nothing before that.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import platform
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Clock = Callable[[], float]


@dataclass(frozen=True)
class Setup:
    """What an engine is given.

    Attributes:
        folder: a model folder as mlx-lm and transformers take it.
        gguf: the same model for llama.cpp, or an empty string.
        threads: of the engine's own pool.
        most_tokens: the longest sequence that it will hold.
        batch_tokens: the longest prompt that must go through in one piece.
    """

    folder: str
    gguf: str
    threads: int
    most_tokens: int
    batch_tokens: int


@dataclass(frozen=True)
class Timed:
    """One generation: seconds, and the tokens that were chosen.

    Attributes:
        prefill_tokens: of the prompt that `prefill_seconds` took.
        prefill_seconds: of the prompt.
        first_seconds: until the first token can be read.
        decode_seconds: of all tokens after the first.
        tokens: all that were chosen.
    """

    prefill_tokens: int
    prefill_seconds: float
    first_seconds: float
    decode_seconds: float
    tokens: list[int]


class Engine(ABC):
    """A model in memory that generates.

    Args:
        setup: what to load.
        clock: seconds.
    """

    warm_tokens: int | None = None  # of the prompt that is run before anything is timed; None: all of it

    def __init__(self, setup: Setup, clock: Clock = time.perf_counter) -> None:
        self.setup, self.clock = setup, clock

    @abstractmethod
    def load(self) -> Mapping[str, str]:
        """Load the model and return the engine's settings, for the record.

        Raises:
            ModuleNotFoundError: its package is not installed.
        """

    @abstractmethod
    def generate(self, prompt: Sequence[int], count: int) -> Timed:
        """Generate `count` tokens after `prompt`, from an empty cache."""

    @abstractmethod
    def fill(self, prompt: Sequence[int]) -> None:
        """Bring the cache to all of `prompt` but its last token."""

    @abstractmethod
    def extend(self, count: int) -> Timed:
        """Generate `count` tokens after the prompt of `fill`, and take the cache back to where it was."""


# ---- MLX ----


class PlainMlx(Engine):
    """mlx-lm on plain MLX, which compiles no kernel: a few tokens bring everything into memory."""

    warm_tokens: int | None = 4

    def load(self) -> Mapping[str, str]:
        """Load the folder with mlx-lm."""
        from mlx_lm.utils import load_model

        self._model: Any = load_model(Path(self.setup.folder))[0]
        return self.prepare(self._model)

    def prepare(self, model: Any) -> Mapping[str, str]:
        """Leave the model as it is."""
        return {"runs": "plain MLX", "threads": "MLX's own"}

    def generate(self, prompt: Sequence[int], count: int) -> Timed:
        """Generate as the suite reports do."""
        import mlx.core as mx

        from metile.suites import Workload
        from metile.workload import generate

        workload = Workload(len(prompt), count, 1, 1, 1, 1, 0.0, 2048, 0)
        made = generate(self._model, mx.array(list(prompt), mx.int32), workload, self.clock)
        sample, prefilled = made.sample, max(len(prompt) - 1, 1)
        first = sample.time_to_first_token_seconds
        return Timed(
            prefilled,
            prefilled / sample.prefill_tokens_per_second,
            first,
            sample.elapsed_seconds - first,
            list(made.tokens),
        )

    def fill(self, prompt: Sequence[int]) -> None:
        """Prefill in mlx-lm's steps."""
        from mlx_lm.models.cache import make_prompt_cache

        self._cache, self._last, self._length = make_prompt_cache(self._model), int(prompt[-1]), len(prompt) - 1
        for _ in self._steps(prompt[:-1], 1):
            pass
        self._cut()

    def extend(self, count: int) -> Timed:
        """Generate over the cache."""
        start = self.clock()
        steps = self._steps([self._last], count)
        tokens = [next(steps)]
        first = self.clock()
        tokens += steps
        end = self.clock()
        self._cut()
        return Timed(1, first - start, first - start, end - first, tokens)

    def _steps(self, prompt: Sequence[int], count: int) -> Any:
        import mlx.core as mx
        from mlx_lm.generate import generate_step

        steps = generate_step(mx.array(list(prompt)), self._model, max_tokens=count, prompt_cache=self._cache)
        return (int(token) for token, _ in steps)

    def _cut(self) -> None:
        import mlx.core as mx
        from mlx_lm.generate import generation_stream
        from mlx_lm.models.cache import trim_prompt_cache

        mx.synchronize(generation_stream)  # mlx-lm began a step too many
        trim_prompt_cache(self._cache, self._cache[0].offset - self._length)


class Metile(PlainMlx):
    """The same, patched: with the plan that a tuning left for this model, or a quick one."""

    warm_tokens = None

    def prepare(self, model: Any) -> Mapping[str, str]:
        """Patch the model and say what now runs kernels."""
        import metile
        from metile.plans import cached_plan
        from metile.targets import choose_target

        tuned = cached_plan(model, choose_target()) is not None
        self._handle = metile.patch(model)
        plan = self._handle.plan
        kernels = {(key, choice) for key, choice in plan.choices.items() if choice is not None}
        return {
            "runs": str(self._handle),
            "plan": "tuned for this model" if tuned else "quick: untuned defaults",
            "features": ", ".join(sorted(plan.features)) or "none",
            "kernels": str(len(kernels) if self._handle else 0),
            "threads": str(self.setup.threads),
        }


# ---- engines that are fed step by step ----


class Stepwise(Engine):
    """An engine whose cache is fed with tokens and answers with the likeliest next one."""

    @abstractmethod
    def cut(self, length: int) -> None:
        """Forget all but the first `length` tokens."""

    @abstractmethod
    def feed(self, tokens: Sequence[int]) -> int:
        """Append tokens and return the next one."""

    def generate(self, prompt: Sequence[int], count: int) -> Timed:
        """Feed the prompt at once and then token by token."""
        self.cut(0)
        return self._timed(prompt, count)

    def fill(self, prompt: Sequence[int]) -> None:
        """Feed all but the last token."""
        self.cut(0)
        self.feed(prompt[:-1])
        self._last, self._length = int(prompt[-1]), len(prompt) - 1

    def extend(self, count: int) -> Timed:
        """Feed the last token, and what follows one by one."""
        timed = self._timed([self._last], count)
        self.cut(self._length)
        return timed

    def _timed(self, prompt: Sequence[int], count: int) -> Timed:
        start = self.clock()
        tokens = [self.feed(prompt)]
        first = self.clock()
        while len(tokens) < count:
            tokens.append(self.feed(tokens[-1:]))
        end = self.clock()
        return Timed(len(prompt), first - start, first - start, end - first, tokens)


class LlamaCpp(Stepwise):
    """llama.cpp through its C interface, with its own defaults but for threads and lengths."""

    def load(self) -> Mapping[str, str]:
        """Map the GGUF file and make a context."""
        import llama_cpp as api

        self._api: Any = api
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(self.setup.gguf.encode(), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {Path(self.setup.gguf).name}")
        wanted = api.llama_context_default_params()
        wanted.n_ctx = self.setup.most_tokens
        wanted.n_batch = max(self.setup.batch_tokens, wanted.n_ubatch)
        wanted.n_threads = wanted.n_threads_batch = self.setup.threads
        self._context = api.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise ValueError(f"llama.cpp cannot make a context of {self.setup.most_tokens} tokens")
        self._batch = wanted.n_batch
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        return {
            "file": Path(self.setup.gguf).name,
            "system": api.llama_print_system_info().decode().strip(" |"),
            "ggml": _ggml_build(Path(api.__file__).parent / "lib"),
            "threads": f"{wanted.n_threads}, {wanted.n_threads_batch} for the prompt",
            "batch": f"{wanted.n_batch}, in parts of {wanted.n_ubatch}",
            "cache": "f16",
            "flash_attn": {-1: "auto", 0: "off", 1: "on"}.get(wanted.flash_attn_type, "unknown"),
        }

    def cut(self, length: int) -> None:
        """Remove the cache's cells from `length` on."""
        self._api.llama_memory_seq_rm(self._api.llama_get_memory(self._context), 0, length, -1)

    def feed(self, tokens: Sequence[int]) -> int:
        """Decode a batch, in pieces where it is longer than one may be."""
        import numpy as np

        for start in range(0, len(tokens), self._batch):
            part = tokens[start : start + self._batch]
            ids = (self._api.llama_token * len(part))(*part)
            code = self._api.llama_decode(self._context, self._api.llama_batch_get_one(ids, len(part)))
            if code:
                raise RuntimeError(f"llama_decode of {len(part)} tokens returned {code}")
        logits = self._api.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())


def _ggml_build(folder: Path) -> str:
    """Return version and commit of the ggml library in a folder."""
    for path in sorted(folder.glob("*ggml-base*")):
        try:
            library = ctypes.CDLL(str(path))
            version, commit = library.ggml_version, library.ggml_commit
        except (OSError, AttributeError):
            continue
        version.restype = commit.restype = ctypes.c_char_p
        return f"{version().decode()}, commit {commit().decode()}"
    return "unknown"


class Torch(Stepwise):
    """torch on the CPU through transformers, eager, with its default attention and cache."""

    def load(self) -> Mapping[str, str]:
        """Load the folder's safetensors as they are."""
        import torch
        import transformers

        hub: Any = transformers
        torch.set_num_threads(self.setup.threads)
        hub.utils.logging.disable_progress_bar()
        self._torch: Any = torch
        self._new_cache: Any = hub.DynamicCache
        kind = json.loads((Path(self.setup.folder) / "config.json").read_text())["torch_dtype"]
        self._model: Any = hub.AutoModelForCausalLM.from_pretrained(
            self.setup.folder, dtype=getattr(torch, kind), local_files_only=True
        ).eval()
        parameters = inspect.signature(self._model.forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"  # the name before transformers 5.24
        self.cut(0)
        return {
            "dtype": str(self._model.dtype),
            "attention": str(self._model.config._attn_implementation),
            "threads": str(torch.get_num_threads()),
            "capability": torch.backends.cpu.get_cpu_capability(),
        }

    def cut(self, length: int) -> None:
        """Crop the cache, or begin a new one."""
        if length:
            self._cache.crop(length - self._cache.get_seq_length())  # a negative number: tokens to remove
        else:
            self._cache: Any = self._new_cache()

    def feed(self, tokens: Sequence[int]) -> int:
        """Run the model on tokens, with logits of the last alone."""
        with self._torch.inference_mode():
            ids = self._torch.tensor([list(tokens)])
            made = self._model(input_ids=ids, **{self._keyword: self._cache}, use_cache=True, logits_to_keep=1)
            return int(made.logits[0, -1].argmax())


ENGINES: Mapping[str, type[Engine]] = {
    "mlx": PlainMlx,
    "metile": Metile,
    "llama.cpp": LlamaCpp,
    "torch": Torch,
}


def peak_bytes() -> int:
    """Return the largest resident memory of this process so far.

    Linux keeps it for the program that runs; ``getrusage`` there counts that of the parent in, from before ``exec``.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if platform.system() == "Darwin" else most << 10
