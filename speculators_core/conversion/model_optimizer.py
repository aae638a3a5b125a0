"""Exports of NVIDIA Model-Optimizer: `layers.N.*`, no embedding, no `t2d`, a `d2t` in the order of
token frequency, YaRN put into the config at export, and an `eagle_config` full of switches.

Its ids count outputs (FORMATS 4.5 and 5.1). Switches that the speculators format has no words for
are refused. Light: no torch.
"""

from __future__ import annotations

from typing import Any

from speculators_core.conversion.aux_layers import IDS, StatedIds, read_ids
from speculators_core.conversion.naming import is_draft, uses_midlayer
from speculators_core.conversion.plain import Said, plan_plain
from speculators_core.conversion.plan import Plan
from speculators_core.conversion.source import Source
from speculators_core.conversion.specforge import ARCHITECTURE
from speculators_core.errors import CheckpointError
from speculators_core.models.verifier_config import VerifierFacts
from speculators_core.params import ConvertParams

_NEEDED: dict[str, tuple[Any, str]] = {
    "use_aux_hidden_state": (True, "the draft sees only the verifier's last state (EAGLE-1)"),
    "use_input_layernorm_in_first_layer": (True, "the token's embedding is not normed"),
    "use_last_layernorm": (True, "lm_head sees the state without a final norm"),
    "use_mtp_layernorm": (False, "the state passes a further norm (MTP)"),
    "next_layer_regular": (True, "the layers after the first are not ordinary ones"),
    "parallel_draft_step": (1, "several tokens are drafted at once by heads of their own"),
}
"""What `eagle_config` must say, where it says anything, and what another value would mean."""
_SILENT = {IDS, "parallel_draft_heads_num_layers", "has_lm_head", "norm_before_fc"}
_TWO_NORMS = (
    "Model-Optimizer's trainer for Hugging Face models norms the state twice on its way into "
    "attention (input_layernorm, then hidden_norm), vLLM and speculators once: trust the measured "
    "acceptance, not the training curve"
)
_ADAPTER = (
    "adapter_model.safetensors lies beside the draft: it was trained on a verifier with this "
    "adapter, and fits only that"
)


class ModelOptimizer:
    """See `plan.Layout`."""

    name = "eagle3-model-optimizer"

    def recognises(self, source: Source) -> bool:
        config = source.config
        if "speculators_model_type" in config:
            return False
        block = config.get("eagle_config")
        marks = _NEEDED.keys() - {"use_aux_hidden_state"}  # which others write, too
        switches = block.keys() & marks if isinstance(block, dict) else set()
        named = ARCHITECTURE in (config.get("architectures") or [])
        bare = is_draft(source) and not uses_midlayer(source) and "t2d" not in source.tensors
        return bool(switches) or (named and bare)

    def plan(self, source: Source, verifier: VerifierFacts | None, params: ConvertParams) -> Plan:
        block = source.config.get("eagle_config") or {}
        _check_attention(source)
        _check_switches(block, source)
        warnings = [_TWO_NORMS]
        if (source.directory / "adapter_model.safetensors").exists():
            warnings.append(_ADAPTER)
        ids = StatedIds(read_ids(block, IDS, source), "output", "Model-Optimizer")
        return plan_plain(self.name, source, verifier, params, Said(ids=ids, warnings=warnings))


def _check_switches(block: dict[str, Any], source: Source) -> None:
    where = f"{source.directory / 'config.json'}: eagle_config"
    for name, value in block.items():
        if name in _SILENT or value is None:
            continue
        if name not in _NEEDED:
            raise CheckpointError(
                f"eagle_config.{name} is {value!r}, a switch that is not known here",
                where=f"{where}.{name}",
                hint="it may change what the draft computes: ask for support of it",
            )
        wanted, otherwise = _NEEDED[name]
        if value != wanted:
            raise CheckpointError(
                f"eagle_config.{name} is {value!r}: {otherwise}",
                where=f"{where}.{name}",
                hint=f"the speculators format knows only drafts with {wanted!r}",
            )


def _check_attention(source: Source) -> None:
    latent = [name for name in source.tensors if "kv_a_proj" in name or "kv_b_proj" in name]
    if latent:
        raise CheckpointError(
            f"the draft's attention is multi-head latent attention ({latent[0]})",
            where=str(source.directory),
            hint="the speculators format knows only drafts with Llama's attention",
        )
