"""The script behind the figure of docs/huggingface.md runs, and every implementation in it is right."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "decode_speed.py"
TINY = "--layers 1 --hidden 64 --experts 8 --intermediate 32 --top-k 2 --heads 8 --prompt 4 --steps 2 --rounds 1"


def test_runs_and_agrees() -> None:
    command = [sys.executable, str(SCRIPT), *TINY.split(), "--dtype", "float32", "--blocks"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| moefuse")]
    assert len(rows) == 3
    assert "wrong" not in done.stdout
    assert "moefuse captured: " in done.stdout.split("in blocks as in a Q4_K_M file")[1]
