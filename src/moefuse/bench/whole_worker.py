"""One side of `moefuse.bench.whole`: a process that runs a GGUF file in moefuse or in llama.cpp, as it is told.

It is started by its path, so that a process that runs llama.cpp has nothing of ours or of torch in its memory. Requests
come as lines of JSON on the standard input, and one line answers each.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol

_pointer, _int, _bool = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool


class Engine(Protocol):
    """A model, and what it remembers of sequences of tokens."""

    def fill(self, prompts: list[list[int]]) -> None:
        """Forget everything, and take prompts of one length."""

    def step(self, tokens: list[int]) -> None:
        """One more token for each sequence."""

    def logits(self) -> bytes:
        """Those behind the first sequence, in float32."""


class Ours:
    """The model as ``moefuse run`` prepares it."""

    def __init__(self, path: str, threads: int, places: int) -> None:
        import torch

        from moefuse import config
        from moefuse.bench.light import many_imports, without_compiler

        config.cap_onednn()
        torch.set_num_threads(threads)
        with many_imports(), without_compiler():
            from moefuse import hf
            from moefuse.hf.capture import Step

            self.model, _ = hf.from_gguf(path, progress=False)
        hf.patch(self.model)
        self.torch, self.made, self.places = torch, Step, places
        self.sequence: Any = None

    def fill(self, prompts: list[list[int]]) -> None:
        with self.torch.no_grad():
            if self.sequence is None or self.sequence.batch != len(prompts):
                self.sequence = self.made(self.model, len(prompts), self.places)
            self.last = self.sequence.prefill(self.torch.tensor(prompts), None)

    def step(self, tokens: list[int]) -> None:
        with self.torch.no_grad():
            self.last = self.sequence(self.torch.tensor(tokens))

    def logits(self) -> bytes:
        numbers: bytes = self.last[0].float().numpy().tobytes()
        return numbers


class _ModelParams(ctypes.Structure):
    """The beginning of ``llama_model_params``; a larger one is only read, and copied, as far as it goes."""

    _fields_ = (("devices", _pointer), ("overrides", _pointer), ("n_gpu_layers", _int), ("more", ctypes.c_byte * 1004))


class _ContextParams(ctypes.Structure):
    """The beginning of ``llama_context_params``."""

    _fields_ = (
        ("n_ctx", _int),
        ("n_batch", _int),
        ("n_ubatch", _int),
        ("n_seq_max", _int),
        ("more", ctypes.c_byte * 1008),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", _int),
        ("token", ctypes.POINTER(_int)),
        ("embd", _pointer),
        ("pos", ctypes.POINTER(_int)),
        ("n_seq_id", ctypes.POINTER(_int)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(_int))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_backend_init": (None,),
    "llama_log_set": (None, _pointer, _pointer),
    "llama_model_default_params": (_ModelParams,),
    "llama_model_load_from_file": (_pointer, ctypes.c_char_p, _ModelParams),
    "llama_model_get_vocab": (_pointer, _pointer),
    "llama_vocab_n_tokens": (_int, _pointer),
    "llama_context_default_params": (_ContextParams,),
    "llama_init_from_model": (_pointer, _pointer, _ContextParams),
    "llama_n_seq_max": (_int, _pointer),
    "llama_set_n_threads": (None, _pointer, _int, _int),
    "llama_free": (None, _pointer),
    "llama_get_memory": (_pointer, _pointer),
    "llama_memory_clear": (None, _pointer, _bool),
    "llama_batch_init": (_Batch, _int, _int, _int),
    "llama_decode": (_int, _pointer, _Batch),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), _pointer, _int),
}


class LlamaCpp:
    """The model in llama.cpp, with its defaults: mapped, and repacked where it has a form for this processor."""

    def __init__(self, path: str, threads: int, places: int, library: str) -> None:
        self.library = self._loaded(Path(library))
        self.threads, self.places = threads, places
        self.context: Any = None
        self.sequences = 0
        self.batch = self.library.llama_batch_init(max(places, 2048), 0, 1)
        self.quiet = ctypes.CFUNCTYPE(None, _int, ctypes.c_char_p, _pointer)(lambda *_: None)
        self.library.llama_log_set(ctypes.cast(self.quiet, _pointer), None)
        self.library.llama_backend_init()
        params = self.library.llama_model_default_params()
        self.no_devices = (_pointer * 1)(None)
        params.devices, params.n_gpu_layers = ctypes.cast(self.no_devices, _pointer), 0
        self.model = self.library.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise ValueError(f"llama.cpp cannot load {path}")
        self.vocabulary = self.library.llama_vocab_n_tokens(self.library.llama_model_get_vocab(self.model))

    @staticmethod
    def _loaded(path: Path) -> Any:
        library = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _SIGNATURES.items():
            try:
                function = getattr(library, name)
            except AttributeError:
                raise ValueError(f"{path} has no {name}: it must be of July 2025 or newer") from None
            function.restype, function.argtypes = result, arguments
        # Of a build with its processors' code in libraries of their own, which it looks for beside the program.
        load = getattr(library, "ggml_backend_load_all_from_path", None)
        if load is not None:
            load(str(path.parent).encode())
        return library

    def fill(self, prompts: list[list[int]]) -> None:
        if len(prompts) != self.sequences:
            self._open(len(prompts))
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        length = len(prompts[0])
        cells = [(token, at, row) for row, prompt in enumerate(prompts) for at, token in enumerate(prompt)]
        self._decode([(token, at, row, at == length - 1) for token, at, row in cells])
        self.at = length

    def _open(self, sequences: int) -> None:
        if self.context is not None:
            self.library.llama_free(self.context)
        params = self.library.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * self.places, sequences
        self.context, self.sequences = self.library.llama_init_from_model(self.model, params), sequences
        if not self.context or self.library.llama_n_seq_max(self.context) != sequences:
            raise ValueError(f"llama.cpp makes no context for {sequences} sequences of {self.places} tokens")
        self.library.llama_set_n_threads(self.context, self.threads, self.threads)

    def step(self, tokens: list[int]) -> None:
        self._decode([(token, self.at, row, True) for row, token in enumerate(tokens)])
        self.at += 1

    def _decode(self, cells: list[tuple[int, int, int, bool]]) -> None:
        batch = self.batch
        batch.n_tokens = len(cells)
        for i, (token, at, row, wanted) in enumerate(cells):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, at, 1, wanted
            batch.seq_id[i][0] = row
        status = self.library.llama_decode(self.context, batch)
        if status != 0:
            raise ValueError(f"llama_decode returned {status}")
        self.first = next(i for i, (*_, wanted) in enumerate(cells) if wanted)
        self.last = self.library.llama_get_logits_ith(self.context, self.first)  # waits for them

    def logits(self) -> bytes:
        return ctypes.string_at(self.last, 4 * self.vocabulary)


def memory(path: str) -> dict[str, int]:
    """Bytes that are resident, at most so far and now, and those of them that are pages of the file."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {key: int(status[name].split()[0]) * 1024 for key, name in (("peak", "VmHWM"), ("resident", "VmRSS"))}
    pages, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split(maxsplit=1)
        if not first.endswith(":"):
            inside = line.endswith(path)
        elif first == "Rss:" and inside:
            pages += int(line.split()[1]) * 1024
    return found | {"file": pages}


def answer(engine: Engine, path: str, request: dict[str, Any]) -> dict[str, Any]:
    """Seconds for a prompt or per step, the memory that is used, or logits into a file."""
    if request["do"] == "memory":
        return memory(path)
    if request["do"] == "logits":
        Path(request["into"]).write_bytes(engine.logits())
        return {}
    started = time.perf_counter()
    engine.fill(request["prompts"])
    if request["do"] == "prefill":
        return {"seconds": time.perf_counter() - started}
    started = time.perf_counter()
    for tokens in request["tokens"]:
        engine.step(tokens)
    return {"seconds": (time.perf_counter() - started) / len(request["tokens"])}


def main(name: str, path: str, threads: str, places: str, library: str) -> None:
    """Answer requests until there are no more."""
    try:
        sizes = int(threads), int(places)
        engine: Engine = LlamaCpp(path, *sizes, library) if name == "llama-cpp" else Ours(path, *sizes)
        for line in sys.stdin:
            print(json.dumps(answer(engine, path, json.loads(line))), flush=True)
    except (ValueError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
