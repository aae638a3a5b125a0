"""Hidden states of a training, made by a vLLM server before it begins.

The server ends before the trainer loads the verifier, so the two never share a GPU's memory; here
only the verifier's ends are loaded, for its first choices.
"""

from __future__ import annotations

from pathlib import Path

from speculators_core.data.hidden_states import cache_states
from speculators_core.data.prepare import load_prepared
from speculators_core.data.vllm_states import StartVllm, VllmStates
from speculators_core.models.verifier import load_verifier
from speculators_core.params import TrainParams
from speculators_core.progress import Progress
from speculators_core.training.draft import aux_layers
from speculators_core.training.precision import find_machine
from speculators_core.training.sources import states_place
from speculators_core.training.train import check_pair


def make_states(params: TrainParams, start: StartVllm, progress: Progress) -> int:
    """Fill the cache that `train` with these parameters will read; the number of documents that
    are quarantined. Where nothing is missing, no server is started.

    Raises what `cache_states` and `VllmStates` do, and `PairingError` as `train` does.
    """
    prepared = load_prepared(params.data)
    machine = find_machine(params)
    verifier = load_verifier(
        params.verifier, dtype=machine.dtype, device=machine.device, ends_only=True
    )
    check_pair(prepared, verifier, params)
    layers = aux_layers(params, verifier.facts)
    longest, beside = int(prepared.lengths.max()), Path(params.data)
    with VllmStates(verifier, layers, longest, beside, start, progress) as producer:
        place = states_place(params, prepared, producer)
        cache = cache_states(prepared, producer, place, progress, dtype=params.states_dtype)
    return len(cache.quarantined)
