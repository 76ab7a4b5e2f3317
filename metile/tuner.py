"""Tuning one model, from the search of its kernels to its record in the report."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from metile import hub, models, verify
from metile.cache import PlanCache
from metile.dispatch import Decision, Plan
from metile.ops.base import ROW_BUCKETS, OpKey, row_bucket
from metile.patch import apply
from metile.plan import PlanSearch, Trial, judge_plan, paired_generations, samples_of, useful_features
from metile.plans import digest_of, save_plan
from metile.progress import Reporter
from metile.record import model_record
from metile.report import ModelReport, PlanConfirmation, Sample, confirmation_of, speedups_of
from metile.search import MAX_CANDIDATES, search
from metile.search import Progress as SearchProgress
from metile.sites import Found
from metile.store import DecisionStore, machine_key
from metile.suites import Suite, SuiteModel, Workload
from metile.targets.base import Target
from metile.workload import Generation, generate, text_prompt, token_ids

_WARM_TOKENS = 2
_UNTIMED_CANDIDATES = 6  # of a key, where each runs on a simulator


@dataclass
class Tuning:
    """All that tuning one model found out; what the record is made from."""

    spec: SuiteModel
    workload: Workload
    target: Target
    found: Found
    decisions: Mapping[OpKey, Decision] = field(default_factory=dict)
    trials: Sequence[Trial] = ()
    candidate: Plan | None = None
    verdict: verify.Verdict | None = None
    pairs: Sequence[tuple[Generation, Generation]] = ()
    confirmation: PlanConfirmation | None = None
    refused: tuple[str, ...] = ()
    mlx_samples: Sequence[Sample] = ()
    metile_samples: Sequence[Sample] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def selected(self) -> Plan | None:
        """The plan that was confirmed, or None where plain MLX stays."""
        return self.candidate if self.confirmation is not None and self.confirmation.accepted else None


def workload_buckets(workload: Workload) -> list[int]:
    """Return the row buckets that a workload meets: its prefill steps, and one row."""
    prefix = max(workload.prompt_tokens - 1, 1)
    sizes = {min(prefix, workload.prefill_step_size), prefix % workload.prefill_step_size, 1}
    buckets = map(row_bucket, sorted(sizes, reverse=True))
    return list(dict.fromkeys(bucket for bucket in buckets if bucket is not None))


def other_buckets(workload: Workload) -> list[int]:
    """Return the buckets beside a workload's own that are decided by what won there, up to twice its prompt."""
    own = set(workload_buckets(workload))
    return [b for b in ROW_BUCKETS if b not in own and b <= max(2 * max(own), 16)]


class Tuner:
    """Tunes models of one suite on one target.

    Args:
        suite: the workload and the budget.
        target: what runs the kernels.
        reporter: shows what happens.
        offline: never ask a model hub.
        fresh: forget what was decided before.
    """

    def __init__(
        self, suite: Suite, target: Target, reporter: Reporter, *, offline: bool = False, fresh: bool = False
    ) -> None:
        self.suite, self.target, self.reporter = suite, target, reporter
        self.workload = suite.workload
        self.offline, self.fresh = offline, fresh

    def tune(self, spec: SuiteModel) -> ModelReport:
        """Tune one model and return its record.

        Raises:
            MetileError: the model cannot be had or loaded.
        """
        reporter = self.reporter
        reporter.seconds.clear()  # what an earlier model took stands in its own record
        mx.clear_cache()
        mx.reset_peak_memory()
        with reporter.stage("load", spec.id):
            path = hub.resolve(spec, offline=self.offline)
            model, tokenizer = hub.load(path)
            mx.eval(model.parameters())
            # Before anything is timed: plain MLX reads the same weights, on the same pages.
            self.target.prepare(array for _, array in tree_flatten(model.parameters()) if array.ndim > 1)
        tuning = Tuning(spec, self.workload, self.target, models.find(model))
        cache = PlanCache(digest_of(model))
        if self.fresh:
            cache.clear(machine_key(self.target))
        prompt = text_prompt(tokenizer, self.workload.prompt_tokens, self.workload.seed)
        self._search(tuning, cache)
        self._plan(tuning, model, prompt)
        self._verify(tuning, model, prompt)
        self._confirm(tuning, model, prompt)
        self._measure(tuning, model, prompt)
        selected = tuning.selected or Plan(self.target.name, frozenset(), {})
        save_plan(cache, self.target, selected, self.workload, {"refused": list(tuning.refused)})
        return model_record(tuning, model, path, dict(reporter.seconds), git_revision())

    def keys(self, found: Found) -> tuple[list[OpKey], list[OpKey]]:
        """Return the keys that the workload meets, and those of the neighbouring buckets."""
        own, other = workload_buckets(self.workload), other_buckets(self.workload)
        primary = dict.fromkeys(key for site in found.sites for key in site.keys(own, self.context))
        secondary = dict.fromkeys(key for site in found.sites for key in site.keys(other, self.context))
        return list(primary), [key for key in secondary if key not in primary]

    @property
    def context(self) -> int:
        """Tokens in the cache at the end of the workload."""
        return self.workload.prompt_tokens + self.workload.generation_tokens

    def _search(self, tuning: Tuning, cache: PlanCache) -> None:
        store = DecisionStore(cache, machine_key(self.target))
        primary, secondary = self.keys(tuning.found)
        new = [key.subject() for key in (*primary, *secondary) if store.get(key) is None]
        before = len(primary) + len(secondary) - len(new)
        decided = set[str]()

        def show(state: SearchProgress) -> None:
            if state.stage == "decided":
                decided.add(state.subject)
            counts = (state.done, state.total) if state.stage == "compile" else (len(decided), len(new))
            self.reporter.update(f"{state.stage} {state.subject} {state.candidate}", *counts, state.seconds_left)

        detail = f"{len(primary)} shapes of the workload, {len(secondary)} beside them"
        with self.reporter.stage("search", detail + (f", {before} decided before" if before else "")):
            tuning.decisions = search(
                primary,
                self.target,
                neighbours=secondary,
                budget_seconds=self.suite.search_seconds,
                store=store,
                seed=self.workload.seed,
                progress=show,
                max_candidates=MAX_CANDIDATES if self.target.timed else _UNTIMED_CANDIDATES,
            )

    def _plan(self, tuning: Tuning, model: nn.Module, prompt: mx.array) -> None:
        choices = {key: decision.candidate for key, decision in tuning.decisions.items()}
        base = Plan(self.target.name, frozenset(), choices)
        own = workload_buckets(self.workload)
        features = useful_features(base, tuning.found.keys(own, self.context))
        if not features:
            tuning.refused = ("no kernel beats plain MLX on any shape of this model",)
            if not tuning.found.sites:
                tuning.refused = ("the model holds nothing that metile knows how to patch",)
            return
        everything = base.only(features)
        if not self.target.timed:
            tuning.candidate = everything
            return
        with self.reporter.stage("plan", ", ".join(features)):
            self._warm_up(model, everything, prompt)
            finder = PlanSearch(model, base, self.target, prompt, self.workload, self.reporter.update)
            best, tuning.trials = finder.run(features)
        if best is None:
            tuning.refused = ("no set of features beats plain MLX on this model",)
            return
        tuning.candidate = base.only(best.features)

    def _warm_up(self, model: nn.Module, plan: Plan, prompt: mx.array) -> None:
        short = self.workload.replace(generation_tokens=_WARM_TOKENS, delay_seconds=0.0)
        generate(model, prompt[:8], short)
        with apply(model, plan, self.target):
            generate(model, prompt, short)

    def _verify(self, tuning: Tuning, model: nn.Module, prompt: mx.array) -> None:
        if tuning.candidate is None:
            return
        with self.reporter.stage("verify", f"{prompt.shape[0]} tokens against plain MLX and float32"):
            tokens = token_ids(prompt)
            tuning.verdict = judge_plan(model, tuning.candidate, self.target, tokens)
        if not tuning.verdict.ok:
            tuning.refused = tuple(tuning.verdict.reasons)

    def _confirm(self, tuning: Tuning, model: nn.Module, prompt: mx.array) -> None:
        if tuning.candidate is None or tuning.verdict is None or not tuning.verdict.ok:
            return
        if not self.target.timed:
            tuning.refused = (f"{self.target.chip()}: what is not timed is not selected",)
            return
        trials = self.workload.confirmation_trials
        with self.reporter.stage("confirm", f"{trials} pair{'' if trials == 1 else 's'} of the whole workload"):
            tuning.pairs = self._pairs(tuning.candidate, model, prompt, trials, "confirm")
            tuning.confirmation = confirmation_of([speedups_of(a.sample, b.sample) for a, b in tuning.pairs])
        if not tuning.confirmation.accepted:
            tuning.refused = tuple(tuning.confirmation.reasons)
        tuning.notes.append(self._compare_tokens(tuning, model, prompt))

    def _compare_tokens(self, tuning: Tuning, model: nn.Module, prompt: mx.array) -> str:
        plain, ours = tuning.pairs[0]
        if plain.tokens == ours.tokens:
            return f"the plan generates the same {len(plain.tokens)} greedy tokens as plain MLX"
        tokens = token_ids(prompt)
        difference = verify.explain_difference(model, tokens, plain.tokens, ours.tokens)
        if difference is None or difference.tie is None:
            return "the generations differ in length"
        kind = "a near-tie by the float32 run" if difference.near_tie else "not a near-tie by the float32 run"
        return f"the first greedy token that differs from plain MLX is number {difference.index}: {kind}"

    def _measure(self, tuning: Tuning, model: nn.Module, prompt: mx.array) -> None:
        trials, selected = self.workload.trials, tuning.selected
        ending = "" if trials == 1 else "s"
        what = f"{trials} pair{ending} of both" if selected else f"{trials} run{ending} of plain MLX"
        with self.reporter.stage("measure", what):
            if selected is not None:
                pairs = self._pairs(selected, model, prompt, trials, "measure")
                tuning.mlx_samples, tuning.metile_samples = samples_of(pairs)
                return
            runs = []
            for index in range(trials):
                self.reporter.update("plain MLX", index, trials)
                runs.append(generate(model, prompt, self.workload).sample)
            tuning.mlx_samples = tuning.metile_samples = runs

    def _pairs(
        self, plan: Plan, model: nn.Module, prompt: mx.array, trials: int, stage: str
    ) -> list[tuple[Generation, Generation]]:
        def note(done: int, total: int) -> None:
            self.reporter.update(f"{stage} pair", done, total)

        return paired_generations(model, plan, self.target, prompt, self.workload, trials=trials, note=note)


_PACKAGE = Path(__file__).resolve().parent


def git_revision(package: Path = _PACKAGE) -> str | None:
    """Return the commit of the code that measures, or None outside a checkout of it.

    A package installed below somebody else's repository, in a virtual environment say, is no checkout.
    """
    try:
        done = subprocess.run(
            ["git", "-C", str(package), "rev-parse", "--show-toplevel", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    if done.returncode or len(lines) != 2 or Path(lines[0]).resolve() != package.parent:
        return None
    return lines[1]
