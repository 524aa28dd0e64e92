"""Mutated files: only a ValueError comes out of them, and memory stays within 100 MB of the file's size."""

import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import KINDS, LATER, OLD, make
from hostile_gguf import text, value

import moefuse.hf
from moefuse.hf.gguf_tokenizer import read_tokenizer
from moefuse.quant.gguf import read, write

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def fuzz(folder: Path, kinds: list[str], count: int, rng: torch.Generator) -> tuple[int, int]:
    for name in kinds:
        make(KINDS[name], folder / f"{name.replace(' ', '_')}.gguf")
    script, seed = Path(__file__).with_name("hostile_gguf.py"), str(rng.initial_seed())
    done = subprocess.run(
        [sys.executable, script, folder, str(count), seed],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"seed {seed}, exit {done.returncode}\n{done.stderr[-3000:]}"
    ran, refused, loaded, most, slowest = done.stdout.split()
    print(f"{ran} files, {refused} refused, {loaded} loaded, at most {int(most) / 1e6:.0f} MB more, {slowest} s")
    assert int(ran) == count
    return int(refused), int(loaded)


@linux
@pytest.mark.skipif(OLD, reason="this release's own Gemma 4 takes 170 MB for a long context")
def test_a_few_hundred_mutants(tmp_path: Path, rng: torch.Generator) -> None:
    refused, loaded = fuzz(tmp_path, ["olmoe", "gemma4"], 200, rng)
    assert refused > 100
    assert loaded > 2


@linux
@pytest.mark.slow
def test_many_mutants_of_every_kind(tmp_path: Path, rng: torch.Generator) -> None:
    count = int(os.environ.get("HOSTILE_FILES", "3000"))
    refused, loaded = fuzz(tmp_path, list(KINDS), count, rng)
    assert refused > count // 2
    assert loaded > count // 100


def changed(path: Path, kind: str, metadata: dict[str, Any]) -> Path:
    make(KINDS[kind], path)
    file = read(path)
    write(path, dict(file.metadata) | {f"{file.architecture}.{name}": value for name, value in metadata.items()}, file)
    return path


@pytest.mark.parametrize(
    ("kind", "metadata"),
    [
        ("olmoe", {"attention.head_count": 0}),
        ("qwen3moe", {"attention.key_length": float("inf")}),
        ("qwen3moe", {"attention.key_length": 2**31}),
        ("qwen3moe", {"attention.layer_norm_rms_epsilon": float("nan")}),
        ("qwen3moe", {"rope.freq_base": 0.0}),
        ("qwen3moe", {"context_length": -1}),
        ("qwen3moe", {"expert_used_count": 9}),
        ("qwen35moe", {"ssm.time_step_rank": 0}),
        ("qwen35moe", {"ssm.group_count": float("inf")}),
        ("gpt-oss", {"rope.scaling.factor": 0.0}),
        ("gpt-oss", {"attention.sliding_window": "wide"}),
        ("granitemoe", {"attention.scale": float("inf")}),
        ("deepseek2 with sigmoids", {"rope.dimension_count": 2**20}),
        ("deepseek2 with sigmoids", {"expert_group_count": 3}),
        ("gemma4", {"attention.sliding_window_pattern": [True] * 3}),
        ("gemma4", {"attention.head_count_kv": [0, 0, 0]}),
    ],
)
def test_a_value_that_cannot_be_is_named(tmp_path: Path, kind: str, metadata: dict[str, Any]) -> None:
    if kind in LATER:
        pytest.skip("this release of transformers cannot run it")
    path = changed(tmp_path / "model.gguf", kind, metadata)
    word = next(iter(metadata)).split(".")[-1].removeprefix("expert_used_").removeprefix("expert_")
    word = {"count": "top_k=9", "group_count": "equal groups" if "deepseek" in kind else "group_count"}.get(word, word)
    with pytest.raises(ValueError, match=rf"from_gguf: .*{word}"):
        moefuse.hf.from_gguf(path, progress=False)


def tokenizer_file(path: Path, **keys: Any) -> Path:
    """A file of nothing but a tokenizer with scores and no merges."""
    tokens = ["<unk>", "<s>", "a", "b", "ab"]
    found = {
        "general.architecture": "llama", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.zeros(5, "<f4"), "tokenizer.ggml.bos_token_id": 1,
    } | {f"tokenizer.ggml.{name}": value for name, value in keys.items()}  # fmt: skip
    body = b"".join(text(name) + value(item) for name, item in found.items() if item is not None)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, sum(v is not None for v in found.values())) + body)
    return path


LONG = "x" * 200_000


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tokens": ["<unk>", "<s>", "a", "b", LONG]}, "a piece must have at most 256 letters, got 200000"),
        ({"tokens": np.array([1, 2], "<i4")}, "tokens must be strings, got"),
        ({"scores": np.zeros(3, "<f4")}, "scores must be 5 numbers, one a token, got 3"),
        ({"scores": ["a"] * 5}, "scores must be 5 numbers, one a token, got"),
        ({"scores": None}, "must have a score for each"),
        ({"token_type": np.zeros(4, "<i4")}, "token_type must be 5 numbers, one a token, got 4"),
        ({"unknown_token_id": -1}, "unknown_token_id must be that of one of 5 tokens, got -1"),
        ({"unknown_token_id": 2**40}, "unknown_token_id must be that of one of 5 tokens, got"),
        ({"merges": ["ab"]}, "merges of the tokenizer must fit its tokens"),
        ({"add_bos_token": "yes"}, "add_bos_token must be of type bool, got 'yes'"),
        ({"model": LONG}, "model must be gpt2, llama or gemma4, got 'xxx"),
        ({"model": "gpt2", "pre": LONG, "merges": []}, "pre must be one of .* got 'xxx"),
        ({"tokens": ["y" * 2**21, "<s>", "a", "b", "ab"], "token_type": np.array([3, 3, 1, 1, 1], "<i4")},
         "control tokens must have at most 1048576 letters"),
    ],
)  # fmt: skip
def test_a_damaged_tokenizer_is_a_clear_error(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        read_tokenizer(read(tokenizer_file(tmp_path / "a.gguf", **keys)))
    assert len(str(refused.value)) < 600


def test_a_begin_that_means_something_in_a_template(tmp_path: Path) -> None:
    for begin in ("$B", "a:b", "$A:0"):
        ours = read_tokenizer(read(tokenizer_file(tmp_path / "a.gguf", tokens=["<unk>", begin, "▁", "b", "ab"])))
        assert ours.convert_ids_to_tokens(ours("b").input_ids) == [begin, "▁", "b"]
