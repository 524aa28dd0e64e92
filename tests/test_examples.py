"""The examples run, in a small version of themselves."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_training_a_language_model_learns_and_draws(tmp_path: Path) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "loss.png"
    text.write_bytes(b"In the beginning there was a router, and it chose two of eight experts. " * 2000)
    sizes = ("--hidden", "32", "--layers", "1", "--experts", "4", "--batch-size", "4", "--length", "32")
    line = (sys.executable, EXAMPLES / "train_language_model.py", "--text", text, "--steps", "40", *sizes)
    done = subprocess.run(
        (*line, "--rate", "0.01", "--plot", picture), capture_output=True, text=True, check=False, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    start, end = (float(word) for word in done.stdout.split("held out: ")[1].split(" nats")[0].split(" -> "))
    assert end < start - 1
    assert picture.stat().st_size > 5000


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"too short")
    line = (sys.executable, EXAMPLES / "train_language_model.py", "--text", text)
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "at least 100,000" in done.stderr


def test_adapters_on_blocks_learn_and_merge(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A router chose two of eight experts, and the experts were in blocks of four bits. " * 100)
    sizes = ("--steps", "12", "--batch-size", "4", "--length", "32", "--rate", "0.02", "--rank", "4")
    line = (sys.executable, EXAMPLES / "qlora.py", "--text", text, *sizes, "--out", tmp_path / "merged")
    done = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr
    start, end = (float(part.split()[0]) for part in done.stdout.split("held out: ")[1].split(" -> "))
    assert end < start - 1
    assert float(done.stdout.split("merged: ")[1].split()[0]) < 1e-3
    assert (tmp_path / "merged" / "model.safetensors").is_file()
