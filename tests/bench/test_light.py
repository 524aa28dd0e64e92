"""Imports of a process that runs one model: lighter, and torch is as before."""

import subprocess
import sys

import pytest

CODE = """
import sys, torch
from moefuse.bench.light import without_compiler

names = ("allow_in_graph", "assume_constant_result", "disable")
before = [getattr(torch.compiler, name) for name in names] + [torch.distributed.is_available]
with without_compiler():
    import moefuse.hf
    from transformers import Qwen3MoeForCausalLM
    {inside}
print("torch._dynamo" in sys.modules)
assert [getattr(torch.compiler, name) for name in names] + [torch.distributed.is_available] == before
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2
"""


def run(inside: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(inside=inside)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_comes_without_the_compiler_which_still_compiles() -> None:
    transformers = pytest.importorskip("transformers")
    loaded = run("pass")
    if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 22):
        assert loaded == "False"


def test_who_asks_the_compiler_for_more_gets_it() -> None:
    pytest.importorskip("transformers")
    assert run("assert torch._dynamo.config.cache_size_limit > 0") == "True"
