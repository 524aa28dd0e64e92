"""transformers' tensor and expert parallelism on two ranks: our experts inside give the logits of one process."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moefuse.testing.compare import difference

WORKER = Path(__file__).with_name("parallel_worker.py")


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*torchrun, *command], capture_output=True, text=True, env=environment, timeout=280, check=False
    )


def two_ranks(folder: Path, family: str, *modes: str) -> tuple[torch.Tensor, dict[str, list[dict[str, Any]]]]:
    """The logits of one process, and what each rank saw in each mode."""
    model = tiny_model(family)
    model.set_experts_implementation("eager")
    tokens = torch.randint(0, 97, (2, 9))
    with torch.no_grad():
        want = model(input_ids=tokens).logits.double()
    model.save_pretrained(folder)
    torch.save(tokens, folder / "tokens.pt")
    done = launch(str(WORKER), str(folder), *modes)
    assert done.returncode == 0, done.stderr[-4000:]
    return want, {mode: [torch.load(folder / f"{mode}.{rank}.pt") for rank in range(2)] for mode in modes}


@pytest.mark.slow
def test_every_way_of_splitting_gives_the_logits_of_one_process(tmp_path: Path) -> None:
    modes = ("tensor", "masked", "dispatched")
    for _attempt in range(2):  # a router may stand between two experts by less than the sums' order changes
        want, seen = two_ranks(tmp_path, "qwen3_moe", *modes)
        errors = {
            mode: max(difference(rank[key], want).worst for rank in seen[mode] for key in ("logits", "patched"))
            for mode in modes
        }
        if max(errors.values()) < 1e-5:
            break
    assert max(errors.values()) < 1e-5, errors
    E, I, top_k = 8, 24, 3
    for rank in seen["tensor"]:
        assert all(call[1] == top_k and call[3] == E and call[5] == I // 2 for call in rank["calls"])
    for rank in seen["masked"]:
        assert all(call[1] == top_k and call[3] == E // 2 and call[5] == I for call in rank["calls"])
        assert any(call[2] == E // 2 for call in rank["calls"]), "slots of the other rank carry the sentinel"
    for rank in seen["dispatched"]:
        assert all(call[1] == 1 and call[3] == E // 2 for call in rank["calls"])
    assert all("wrapped" in rank["report"] for mode in modes for rank in seen[mode]), "patch leaves split blocks alone"


@pytest.mark.slow
def test_biased_transposed_experts(tmp_path: Path) -> None:
    for _attempt in range(2):
        want, seen = two_ranks(tmp_path, "gpt_oss", "dispatched")
        error = max(difference(rank["logits"], want).worst for rank in seen["dispatched"])
        if error < 1e-5:
            break
    assert error < 1e-5


@pytest.mark.slow
def test_the_command_line_runs_split(tmp_path: Path) -> None:
    """The line that docs/huggingface.md gives."""
    tiny_model("qwen3_moe").save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1").save_pretrained(tmp_path)
    done = launch("-m", "moefuse", "run", str(tmp_path), "--prompt", "w3 w4", "--parallel", "experts", "--compare")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("largest logit difference") == 1, "one rank speaks"
    assert float(done.stdout.split("largest logit difference ")[1].split(",")[0]) < 1e-3
