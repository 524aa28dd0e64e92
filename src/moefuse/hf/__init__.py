"""Hugging Face transformers: importing this package makes ``experts_implementation="moefuse"`` a valid choice.

    import moefuse.hf
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moefuse")

`supports` says whether a model would use it, `patch` runs whole MoE layers where it understands them, `from_gguf` loads
a GGUF file and leaves its weights in their blocks, `quantize_` and `MoefuseConfig` put experts into blocks.
"""

from __future__ import annotations

from moefuse.hf.register import NAME, register

register()

from moefuse.hf.capture import capture, uncapture  # noqa: E402
from moefuse.hf.gguf import from_gguf  # noqa: E402
from moefuse.hf.gguf_experts import BlockExperts, dequantize  # noqa: E402  # transformers must be there and new enough
from moefuse.hf.patch import PatchReport, patch, unpatch  # noqa: E402
from moefuse.hf.quantize import QuantizeReport, quantize_  # noqa: E402
from moefuse.hf.quantizer import MoefuseConfig  # noqa: E402
from moefuse.hf.quantizer import register as register_quantizers  # noqa: E402
from moefuse.hf.routing import register as register_routing  # noqa: E402
from moefuse.hf.support import Support, supports  # noqa: E402

register_quantizers()
register_routing()

__all__ = [
    "NAME",
    "BlockExperts",
    "MoefuseConfig",
    "PatchReport",
    "QuantizeReport",
    "Support",
    "capture",
    "dequantize",
    "from_gguf",
    "patch",
    "quantize_",
    "supports",
    "uncapture",
    "unpatch",
]
