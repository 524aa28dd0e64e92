"""moefuse gguf, as a user runs it."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moefuse.cli import app
from moefuse.quant.gguf import write
from moefuse.testing.random_blocks import random_blocks

E, H, I = 4, 256, 512


def said(*arguments: str, width: int = 200) -> tuple[int, str]:
    # Wide, so that a table is not folded into what a person reads and a test does not.
    result = CliRunner(env={"COLUMNS": str(width), "TERM": "dumb", "NO_COLOR": "1"}).invoke(app, ["gguf", *arguments])
    return result.exit_code, result.output


def save(path: Path, architecture: str = "deepseek2", layers: int = 5, **metadata: object) -> Path:
    rng = torch.Generator().manual_seed(1)
    tensors: dict = {"blk.0.ffn_gate.weight": torch.ones(2, 2)}
    for layer in range(1, layers):
        down = "Q6_K" if layer == 1 else "Q4_K"
        tensors |= {
            f"blk.{layer}.ffn_gate_inp.weight": torch.ones(E, H),
            f"blk.{layer}.ffn_gate_exps.weight": random_blocks("Q4_K", (E, I, H), rng, 0.1),
            f"blk.{layer}.ffn_up_exps.weight": random_blocks("Q5_K", (E, I, H), rng, 0.1),
            f"blk.{layer}.ffn_down_exps.weight": random_blocks(down, (E, H, I), rng, 0.1),
            f"blk.{layer}.ffn_down_shexp.weight": random_blocks("Q8_0", (H, I), rng, 0.1),
        }
    keys = {"general.architecture": architecture, "general.name": "a [red]small[/red] model"}
    keys |= {f"{architecture}.expert_used_count": 2, f"{architecture}.expert_gating_func": 2}
    keys |= {f"{architecture}.{key}": value for key, value in metadata.items()}
    write(path, keys, tensors)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    groups = {"expert_group_count": 2, "expert_group_used_count": 1}
    return save(tmp_path / "a.gguf", expert_weights_scale=2.5, expert_weights_norm=True, **groups)


def test_table(path: Path) -> None:
    code, text = said(str(path))
    assert code == 0, text
    assert "deepseek2 a [red]small[/red] model" in text
    first, rest = (line for line in text.splitlines() if "Q5_K" in line)
    assert first.split() == ["1", "4", "256", "512", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "1.2", "5.75"]
    assert rest.split()[0] == "2-4"
    assert "router: top 2, sigmoid, 1 of 2 groups (top2_sum), renormalised, times 2.5" in text


@pytest.mark.parametrize("width", [50, 80])
def test_no_word_is_broken(path: Path, width: int) -> None:
    code, text = said(str(path), width=width)
    assert code == 0
    assert max(map(len, text.splitlines())) <= width
    words = set(text.replace(";", " ").split())
    assert {"layers", "experts", "2-4", "256", "512", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "shared"} <= words
    assert {"sigmoid,", "(top2_sum),", "renormalised,"} <= words


def test_json(path: Path) -> None:
    code, text = said(str(path), "--json")
    assert code == 0
    known = json.loads(text)
    assert (known["architecture"], known["known"], len(known["layers"])) == ("deepseek2", True, 4)
    layer = known["layers"][0]
    assert layer["types"] == {"gate": "Q4_K", "up": "Q5_K", "down": "Q6_K"}
    assert layer["shared_types"] == {"down": "Q8_0"}
    assert layer["routing"]["score"] == "sigmoid"
    assert layer["bytes"] == E * I * (144 + 176 + 210) + H * I // 32 * 34
    assert known["expert_bytes"] == sum(layer["bytes"] for layer in known["layers"])


def test_an_architecture_without_a_rule_is_shown_all_the_same(tmp_path: Path) -> None:
    path = save(tmp_path / "a.gguf", architecture="grok")
    code, text = said(str(path))
    assert code == 0
    assert "MoE.from_gguf does not take this file: from_gguf: the architecture must be one of" in text
    assert "Q5_K" in text
    assert json.loads(said(str(path), "--json")[1])["layers"][0]["routing"] is None


def test_friendly_errors(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"PK" + bytes(100))
    save(tmp_path / "dense.gguf", "llama", layers=0)
    for name, message in {
        "none.gguf": "No such file",
        "": "Is a directory",
        "model.bin": "must begin with GGUF, got",
        "dense.gguf": "is a dense llama model: no layer has a router",
    }.items():
        code, text = said(str(tmp_path / name))
        assert code == 2
        # Out of its frame and its lines.
        assert message in " ".join(text.replace("│", " ").split())
        assert "Traceback" not in text
