"""from_gguf: a file's model and tokenizer, against transformers with the same numbers."""

from pathlib import Path

import torch
import transformers
from gguf_files import KINDS, TEXT, make
from torch import Tensor

import moefuse.hf
from moefuse.testing.compare import difference


def logits(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=tokens).logits


def test_same_logits_and_tokens_as_the_stock_loader(tmp_path: Path) -> None:
    make(KINDS["qwen3moe"], tmp_path / "model.gguf")
    model, tokenizer = moefuse.hf.from_gguf(tmp_path / "model.gguf", dtype=torch.float32, exact=True, progress=False)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    text = TEXT[:200] + " naïve — 12345 \n\n  don't"
    tokens = tokenizer(text, return_tensors="pt").input_ids
    assert torch.equal(tokens, theirs(text, return_tensors="pt").input_ids)
    assert tokenizer.decode(tokens[0]) == text
    assert difference(logits(model, tokens), logits(stock, tokens).double()).worst < 1e-5
    assert moefuse.hf.patch(model).patched == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert difference(logits(model, tokens), logits(stock, tokens).double()).worst < 1e-5
