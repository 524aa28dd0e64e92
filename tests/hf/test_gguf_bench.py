"""moefuse bench on a GGUF file: ours, and a library that has llama.cpp's functions and none of its sense."""

import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from gguf_files import KINDS, make
from typer.testing import CliRunner

from moefuse import config
from moefuse.bench import whole
from moefuse.cli import app

SOURCE = """
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
struct Batch { int32_t n_tokens, *token; float *embd; int32_t *pos, *n_seq_id, **seq_id; int8_t *logits; };
struct Model { void *devices, *overrides; int32_t n_gpu_layers; char more[60]; };
struct Context { uint32_t n_ctx, n_batch, n_ubatch, n_seq_max; char more[100]; };
static std::vector<float> logits(WORDS);
static Context opened;
static int filled[16];
extern "C" {
void llama_backend_init() {}
void llama_log_set(void*, void*) {}
Model llama_model_default_params() { Model m{}; m.n_gpu_layers = -1; return m; }
void* llama_model_load_from_file(const char* path, Model m) {
  return strstr(path, "refused") || m.n_gpu_layers != 0 || *(void**)m.devices ? nullptr : &logits;
}
void* llama_model_get_vocab(void* model) { return model; }
int32_t llama_vocab_n_tokens(void*) { return WORDS; }
Context llama_context_default_params() { Context c{}; c.n_ctx = 512; c.n_seq_max = 1; return c; }
void* llama_init_from_model(void*, Context c) { opened = c; return &opened; }
int32_t llama_n_seq_max(void*) { return opened.n_seq_max; }
void llama_set_n_threads(void*, int32_t n, int32_t) { if (n != 1) abort(); }
void llama_free(void*) {}
void* llama_get_memory(void* c) { return c; }
void llama_memory_clear(void*, bool) { memset(filled, 0, sizeof filled); }
Batch llama_batch_init(int32_t n, int32_t, int32_t) {
  Batch b{0, new int32_t[n], nullptr, new int32_t[n], new int32_t[n], new int32_t*[n], new int8_t[n]};
  for (int i = 0; i < n; ++i) b.seq_id[i] = new int32_t[1];
  return b;
}
int32_t llama_decode(void*, Batch b) {
  for (int i = 0; i < b.n_tokens; ++i) {
    if (b.token[i] == DIES) abort();
    if (b.token[i] < 0 || b.token[i] >= WORDS || b.n_seq_id[i] != 1) return 1;
    if (b.pos[i] != filled[b.seq_id[i][0]]++) return 2;
    if (filled[b.seq_id[i][0]] > (int)(opened.n_ctx / opened.n_seq_max)) return 3;
  }
  return b.logits[b.n_tokens - 1] ? 0 : 4;
}
float* llama_get_logits_ith(void*, int32_t) { return logits.data(); }
}
"""


def invoke(*words: object) -> tuple[int, str]:
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    result = runner.invoke(app, ["bench", *map(str, words)])
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "model.gguf"
    make(KINDS["qwen3moe"], path, in_blocks=True)
    return path


def build(folder: Path, words: int, dies: int = -1) -> Path:
    if shutil.which(config.cxx()) is None:
        pytest.skip("no C++ compiler")
    source, library = folder / "llama.cpp", folder / whole._LIBRARY
    source.write_text(SOURCE)
    options = [f"-DWORDS={words}", f"-DDIES={dies}", "-shared", "-fPIC", "-o", str(library)]
    subprocess.run([config.cxx(), *options, str(source)], check=True)
    return library


def test_both_take_turns(file: Path, tmp_path: Path) -> None:
    build(tmp_path, whole.words_of(file))
    figures = tmp_path / "figures.json"
    quick = ["--tokens", "20,9", "--repeat", "1", "--threads", "1"]
    code, output = invoke(file, *quick, "--library", tmp_path, "--save", figures)
    assert code == 0, output
    for words in ("prefill, 20 tokens, tokens/s", "prefill, 9 tokens", "decode, 8 sequences", "first token", "gain"):
        assert words in output
    assert "logits of the two differ by 100.0%" in output
    found = json.loads(figures.read_text())
    assert found["rates"].keys() == {"prefill, 20 tokens", "prefill, 9 tokens", "decode", "decode, 8 sequences"}
    for rates in (*found["rates"].values(), found["first_token"]):
        assert list(rates) == ["moefuse", "llama-cpp"]
        assert min(rates.values()) > 0
    ours = found["memory"]["moefuse"]
    assert 0 < ours["file"] <= ours["resident"] <= ours["peak"]
    assert found["memory"]["llama-cpp"]["resident"] < ours["resident"], "it has no torch"
    assert found["machine"]["threads"] == 1


def test_ours_alone(file: Path) -> None:
    code, output = invoke(file, "--tokens", "9", "--repeat", "1", "--threads", "1", "--json")
    assert code == 0, output
    found = json.loads(output)
    assert list(found["first_token"]) == ["moefuse"]
    assert found["logits"] is None


def test_a_peer_that_fails_says_so(file: Path, tmp_path: Path) -> None:
    library = build(tmp_path, whole.words_of(file))
    refused = tmp_path / "refused.gguf"
    refused.write_bytes(file.read_bytes())
    code, output = invoke(refused, "--library", library)
    assert code == 2
    assert f"llama.cpp cannot load {refused}" in output
    first = random.Random(0).randrange(whole.words_of(file))
    build(tmp_path, whole.words_of(file), dies=first)
    code, output = invoke(file, "--library", tmp_path, "--threads", "1")
    assert code == 2
    assert "llama-cpp ended: exit code -6" in output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--library", "/nonesuch"], "there is no /nonesuch"),
        (["--against", "hf-grouped"], "'hf-grouped' is not one of llama-cpp, none"),
        (["--training"], "a GGUF file is timed whole"),
        (["--weights", "Q4_K"], "a GGUF file is timed whole"),
        (["--experts", "8"], "a GGUF file is timed whole"),
        (["--dtype", "float32"], "a GGUF file is timed whole"),
        (["--device", "cuda"], "a GGUF file is timed whole"),
        (["--save", "/nonesuch/figures.json"], "no folder"),
        (["--tokens", "0"], "whole numbers"),
    ],
)
def test_bad_input_is_refused_with_the_reason(file: Path, words: list[str], why: str) -> None:
    code, output = invoke(file, *words)
    assert code == 2
    assert why in output


def test_a_missing_or_damaged_file_and_library(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, output = invoke(tmp_path / "none.gguf")
    assert code == 2
    assert f"there is no file {tmp_path / 'none.gguf'}" in output
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:100])
    code, output = invoke(tmp_path / "cut.gguf")
    assert code == 2
    assert "cannot be read" in output
    code, output = invoke("--library", tmp_path)
    assert code == 2
    assert "it is for a GGUF file" in output
    monkeypatch.setattr(whole.importlib.util, "find_spec", lambda _: None)
    code, output = invoke(file, "--against", "llama-cpp")
    assert code == 2
    assert "llama.cpp is not installed: pip install llama-cpp-python" in output


def test_an_older_library_is_refused(file: Path, tmp_path: Path) -> None:
    build(tmp_path, 8)
    source = (tmp_path / "llama.cpp").read_text().replace("llama_memory_clear", "llama_kv_cache_clear")
    (tmp_path / "llama.cpp").write_text(source)
    library = tmp_path / whole._LIBRARY
    words = ["-DWORDS=8", "-DDIES=-1", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "llama.cpp")]
    subprocess.run([config.cxx(), *words], check=True)
    code, output = invoke(file, "--library", library)
    assert code == 2
    assert "has no llama_memory_clear: it must be of July 2025 or newer" in output
