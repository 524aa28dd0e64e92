"""Loading a file takes next to no memory, and running it little more than the file."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from gguf_files import VOCABULARY, tokenizer_keys

from moefuse import QuantTensor
from moefuse.quant.gguf import write
from moefuse.testing.random_blocks import random_blocks

LAYERS, H, I, E, HEADS = 8, 1024, 512, 64, 8

# The peak of this process alone: what resource reports may be its parent's.
RUN = """
import sys, torch, moefuse.hf
from pathlib import Path

def peak():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024

from transformers import Qwen3MoeForCausalLM
print(peak())
model, _ = moefuse.hf.from_gguf(sys.argv[1], progress=False)
print(peak())
moefuse.hf.patch(model)
with torch.no_grad():
    for _ in range(4):
        logits = model(input_ids=torch.randint(0, model.config.vocab_size, (1, 256))).logits
assert logits.isfinite().all()
print(peak())
"""


def make_large(path: Path, rng: torch.Generator) -> None:
    """A file of half a gigabyte in the proportions of Qwen3-30B-A3B: 19 of 20 weights are experts'."""
    keys = {
        "context_length": 512, "embedding_length": H, "block_count": LAYERS, "attention.head_count": HEADS,
        "attention.head_count_kv": 2, "attention.key_length": 128, "attention.layer_norm_rms_epsilon": 1e-6,
        "expert_count": E, "expert_used_count": 8,
    }  # fmt: skip

    def blocks(form: str, *shape: int) -> QuantTensor:
        return random_blocks(form, shape, rng, shape[-1] ** -0.5)

    layer = {
        "attn_norm.weight": torch.ones(H), "ffn_norm.weight": torch.ones(H), "attn_q_norm.weight": torch.ones(128),
        "attn_k_norm.weight": torch.ones(128), "attn_q.weight": blocks("Q4_K", 1024, H),
        "attn_k.weight": blocks("Q4_K", 256, H), "attn_v.weight": blocks("Q6_K", 256, H),
        "attn_output.weight": blocks("Q4_K", H, 1024), "ffn_gate_inp.weight": torch.randn(E, H) * H**-0.5,
        "ffn_gate_exps.weight": blocks("Q4_K", E, I, H), "ffn_up_exps.weight": blocks("Q4_K", E, I, H),
        "ffn_down_exps.weight": blocks("Q6_K", E, H, I),
    }  # fmt: skip
    words = 64 * VOCABULARY
    tensors = {"token_embd.weight": blocks("Q4_K", words, H), "output.weight": blocks("Q6_K", words, H),
               "output_norm.weight": torch.ones(H)}  # fmt: skip
    tensors |= {f"blk.{i}.{name}": value for i in range(LAYERS) for name, value in layer.items()}
    metadata = {"general.architecture": "qwen3moe"} | {f"qwen3moe.{key}": value for key, value in keys.items()}
    write(path, metadata | tokenizer_keys(), tensors)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_is_little_more_than_the_file(tmp_path: Path, rng: torch.Generator) -> None:
    path = tmp_path / "model.gguf"
    make_large(path, rng)
    size = path.stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), str(path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    path.unlink()
    assert done.returncode == 0, done.stderr
    imported, loaded, peak = map(int, done.stdout.split())
    print(f"file {size / 2**20:.0f} MiB, peak {[one // 2**20 for one in (imported, loaded, peak)]} MiB")
    assert loaded <= imported + 2**25, "loading is the mapping of the file"
    assert peak <= imported + size + 2**27
