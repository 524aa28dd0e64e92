"""The tokenizer of a GGUF file: transformers' own conversion where it has one, and what is put around a text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import END, TEXT, tokenizer, tokenizer_keys
from tokenizers import Tokenizer, models, normalizers, trainers

from moefuse.hf.gguf_tokenizer import _SPLITS, read_tokenizer
from moefuse.quant.gguf import read, write

TEXTS = (
    "it was the best of times, it was the worst of times",
    "  Two spaces, a\ttab\n\nand lines \r\n of It's I'LL don't 1234567 x1y22 3.14159 $%&!? -- a_b",
    "naïve façade: 東京タワー 한국어 Ωμέγα Привет мир עברית हिन्दी 🙂🙃 ½ ² …",
    "\n",
    " ",
)


def made(folder: Path, **changes: Any) -> Any:
    """The tokenizer of a file with these keys; None takes one away."""
    keys = tokenizer_keys() | {f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}
    keys = {name: value for name, value in keys.items() if value is not None}
    write(folder / "a.gguf", {"general.architecture": "olmoe"} | keys, {"w": torch.ones(1)})
    return read_tokenizer(read(folder / "a.gguf"))


def theirs(folder: Path) -> Tokenizer:
    conversion = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    if not hasattr(conversion, "GGUF_PRE_TOKENIZER_SPLITS"):
        pytest.skip("this release of transformers splits all texts alike")
    architecture, data, _ = conversion.get_gguf_tokenizer(str(folder / "a.gguf"))
    return conversion.convert_gguf_tokenizer(architecture, data)[0]


@pytest.mark.parametrize("split", ["gpt-2", "olmo", "llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken", "dbrx"])
def test_byte_level_tokens_are_those_of_transformers(tmp_path: Path, split: str) -> None:
    ours = made(tmp_path, ggml__pre=split, ggml__add_bos_token=False)
    other = theirs(tmp_path)
    for text in TEXTS:
        assert ours(text).input_ids == other.encode(text).ids, text
        assert ours.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text) == (
            other.pre_tokenizer.pre_tokenize_str(text)
        ), text


@pytest.mark.parametrize("split", _SPLITS)
def test_every_split_loses_nothing(tmp_path: Path, split: str) -> None:
    ours = made(tmp_path, ggml__pre=split, ggml__add_bos_token=False)
    for text in TEXTS:
        assert ours.decode(ours(text).input_ids) == text


def test_splits_that_transformers_does_not_have(tmp_path: Path) -> None:
    def pieces(split: str, text: str) -> list[str]:
        parts = made(tmp_path, ggml__pre=split).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in parts]

    assert pieces("refact", "in 2024 it's") == ["in", " ", "2", "0", "2", "4", " it", "'s"]
    assert pieces("deepseek-llm", "Ωμέγα 12 ab\n(x)") == ["Ωμέγα", " ", "12", " ab", "\n", "(", "x", ")"]
    assert pieces("deepseek-v3", "1234.net ?! 東京a") == ["123", "4", ".net", " ?!", " ", "東京", "a"]
    assert pieces("default", "a 12345!? b") == ["a", " ", "123", "45", "!?", " b"]


def sentencepiece(folder: Path, **changes: Any) -> Any:
    """A file with pieces and scores, as Llama 2 and Mixtral have them."""
    learner = Tokenizer(models.BPE())
    learner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    learner.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=120, show_progress=False, max_token_length=6))
    pieces = sorted(learner.get_vocab(), key=learner.get_vocab().__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<think>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0]
    keys = {
        "ggml__model": "llama", "ggml__pre": None, "ggml__tokens": tokens, "ggml__token_type": types,
        "ggml__scores": scores, "ggml__merges": None, "ggml__bos_token_id": 1, "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0, "ggml__padding_token_id": None, "ggml__add_bos_token": None,
    }  # fmt: skip
    return made(folder, **keys | changes)


def test_sentencepiece_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path)
    other = theirs(tmp_path)
    for text in TEXTS:
        ids = ours(text).input_ids
        assert ids[0] == 1, "a text begins with <s> where the file does not say otherwise"
        assert ours.decode(ids, skip_special_tokens=True) == text
        if not text.startswith(" "):  # a blank more or less in front is where normalisers differ
            assert ids[1:] == other.encode(text, add_special_tokens=False).ids, text
    assert 0 not in ours("東京 \x00").input_ids, "what is in no piece is spelled in bytes"
    assert ours.convert_tokens_to_ids("<think>") in ours("it <think> was").input_ids


def test_gemma_has_merges_and_no_blank_in_front(tmp_path: Path) -> None:
    ours = sentencepiece(tmp_path, ggml__model="gemma4", ggml__merges=["▁ w", "a s", "▁w as"], ggml__add_bos_token=True,
                         ggml__add_space_prefix=False)  # fmt: skip
    assert ours.convert_ids_to_tokens(ours("was was").input_ids) == ["<s>", "w", "as", "▁was"]
    assert ours.decode(ours("was was").input_ids, skip_special_tokens=True) == "was was"


def test_begin_end_special_and_template(tmp_path: Path) -> None:
    end = tokenizer().token_to_id(END)
    ours = made(
        tmp_path, ggml__add_bos_token=True, ggml__add_eos_token=True, chat_template="{{ messages[0].content }}!"
    )
    ids = ours("it was").input_ids
    assert (ids[0], ids[-1]) == (end, end)
    assert ours.decode(ids, skip_special_tokens=True) == "it was"
    assert ours(f"it{END}was", add_special_tokens=False).input_ids.count(end) == 1, "control tokens stay whole"
    assert (ours.eos_token, ours.bos_token, ours.pad_token) == (END, END, END)
    turns = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(turns, tokenize=False) == "hello!"
    assert made(tmp_path, ggml__add_bos_token=None)("it").input_ids[0] != end
    assert made(tmp_path, ggml__pre="llama-bpe", ggml__add_bos_token=None)("it").input_ids[0] == end
