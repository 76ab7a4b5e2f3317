"""Which state a patched module of each kind of site has."""

from __future__ import annotations

from metile.patched import MlpState, Runtime, State, VocabularyState, WeightedState
from metile.patched_decoder import AttentionState, LayerState
from metile.sites import Site

STATES: dict[str, type[State]] = {
    "attention": AttentionState,
    "decoder_layer": LayerState,
    "linear": WeightedState,
    "rms_norm": WeightedState,
    "swiglu_mlp": MlpState,
    "vocabulary": VocabularyState,
}


def state_for(site: Site, runtime: Runtime) -> State:
    """Return the state of the module at a site."""
    return STATES[site.kind](site, runtime)
