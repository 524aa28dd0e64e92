"""A whole GGUF model beside llama.cpp: prompts, tokens one by one, the time to the first, and memory.

Each has a process of its own (`moefuse.bench.whole_worker`), so that neither has the other's threads or memory. They
take turns on the same tokens; the one whose turn it is not waits for its next line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moefuse.bench import machine, whole_worker
from moefuse.bench.report import titled
from moefuse.bench.result import OURS
from moefuse.quant.gguf import Malformed, read

LLAMA_CPP = "llama-cpp"
_LIBRARY = {"darwin": "libllama.dylib", "win32": "llama.dll"}.get(sys.platform, "libllama.so")
#: of the prompts that tokens are decoded behind, and of the one that the first token is waited for
_PROMPT, _SHORT_PROMPT = 64, 8
_STEPS = 32
_SEQUENCES = 8
ROUNDS = 5


@dataclass(frozen=True)
class Workload:
    """What is timed for each of ``batch`` sequences: a prompt of so many tokens, or steps behind one."""

    name: str
    batch: int
    prompt: int
    steps: int = 0

    @property
    def tokens(self) -> int:
        """Tokens for which the seconds of a turn are."""
        return self.batch if self.steps else self.batch * self.prompt


@dataclass
class WholeResult:
    """Figures of a file.

    Attributes:
        rates: workload -> contestant -> tokens per second, the median of the rounds.
        first_token: contestant -> seconds from the start of its process to the first token of a short prompt.
        memory: contestant -> bytes, as `moefuse.bench.whole_worker.memory` gives them, after one sequence's workloads.
        logits: how far the peer's logits are from ours behind the same prompt: root mean square over ours.
    """

    path: str
    command: str
    machine: dict[str, Any]
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    first_token: dict[str, float] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    logits: float | None = None
    notes: list[str] = field(default_factory=list)


def find_library(given: Path | None) -> Path:
    """llama.cpp's library: a file, or in a folder, that is given; else that of the ``llama-cpp-python`` package."""
    if given is not None:
        found = given / _LIBRARY if given.is_dir() else given
        if not found.is_file():
            raise ValueError(f"there is no {found}")
        return found
    spec = importlib.util.find_spec("llama_cpp")
    places = [] if spec is None else spec.submodule_search_locations or []
    libraries = [Path(place) / "lib" / _LIBRARY for place in places]
    if not any(library.is_file() for library in libraries):
        raise ValueError(f"llama.cpp is not installed: pip install llama-cpp-python, or name its {_LIBRARY}")
    return next(library for library in libraries if library.is_file())


class Contestant:
    """A worker's process, and what it answers."""

    def __init__(self, name: str, path: Path, threads: int, places: int, library: Path | None) -> None:
        self.name, self.started = name, time.perf_counter()
        words = [name, str(path), str(threads), str(places), str(library or "")]
        # Its own folder is not to be searched for modules (-P), as it would be for a program.
        self.process = subprocess.Popen(
            [sys.executable, "-P", whole_worker.__file__, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it may have said why before it ended
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        lines = self.process.stderr.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self.process.wait()}"

    def turn(self, workload: Workload, prompts: list[list[int]], tokens: list[list[int]]) -> float:
        request = {"do": "decode", "tokens": tokens} if workload.steps else {"do": "prefill"}
        return float(self.ask(prompts=prompts, **request)["seconds"])

    def close(self) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()


def workloads(prompts: Sequence[int]) -> list[Workload]:
    """Those of one sequence come first."""
    return [
        *(Workload(f"prefill, {length} tokens", 1, length) for length in prompts),
        Workload("decode", 1, _PROMPT, _STEPS),
        Workload(f"decode, {_SEQUENCES} sequences", _SEQUENCES, _PROMPT, _STEPS // 2),
    ]


def words_of(path: Path) -> int:
    """How many words the vocabulary of a file has."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        return len(read(path).metadata["tokenizer.ggml.tokens"])
    except (Malformed, OSError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read: {error or 'it has no vocabulary'}") from error


def bench_file(
    path: Path,
    prompts: Sequence[int],
    library: Path | None,
    rounds: int,
    command: str,
    tick: Callable[[str, float], None],
) -> WholeResult:
    """Time a file in moefuse and, where there is a ``library``, in llama.cpp, with as many threads as torch has."""
    words, threads = words_of(path), torch.get_num_threads()
    result = WholeResult(str(path), command, machine.describe(torch.device("cpu")))
    draw = random.Random(0)
    places = max(*prompts, _PROMPT + _STEPS) + 1
    todo = workloads(prompts)

    def drawn(rows: int, length: int) -> list[list[int]]:
        return [[draw.randrange(words) for _ in range(length)] for _ in range(rows)]

    with ExitStack() as stack:
        field_: list[Contestant] = []
        for name in (OURS,) if library is None else (LLAMA_CPP, OURS):  # the one that may fail begins
            tick(f"starting {name}", 0.0)
            one = Contestant(name, path, threads, places, library)
            stack.callback(one.close)
            field_.insert(0, one)
            one.ask(do="prefill", prompts=drawn(1, _SHORT_PROMPT))
            result.first_token = {name: time.perf_counter() - one.started} | result.first_token
        for done, workload in enumerate(todo):
            if workload.batch > 1 and not result.memory:
                result.memory = {one.name: one.ask(do="memory") for one in field_}
            seconds: dict[str, list[float]] = {one.name: [] for one in field_}
            for turn in range(-1, rounds):  # the first warms up
                tick(workload.name, (done + (turn + 1) / (rounds + 1)) / len(todo))
                given = drawn(workload.batch, workload.prompt), drawn(workload.steps, workload.batch)
                for one in field_:
                    seconds[one.name].append(one.turn(workload, *given))
            result.rates[workload.name] = {
                name: workload.tokens / statistics.median(values[1:]) for name, values in seconds.items()
            }
        if library is not None:
            result.logits = _difference(field_, drawn(1, _PROMPT))
    return result


def _difference(field_: list[Contestant], prompts: list[list[int]]) -> float:
    """Root mean square of the difference of logits, over that of ours, both around their mean."""
    found: list[torch.Tensor] = []
    with tempfile.TemporaryDirectory() as folder:
        for one in field_:
            into = Path(folder) / one.name
            one.ask(do="prefill", prompts=prompts)
            one.ask(do="logits", into=str(into))
            found.append(torch.frombuffer(bytearray(into.read_bytes()), dtype=torch.float32).double())
    ours, theirs = (numbers - numbers.mean() for numbers in found)
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} logits of moefuse and {len(theirs)} of llama.cpp: not the same model")
    return float((ours - theirs).norm() / ours.norm())


def as_text(result: WholeResult) -> str:
    """All figures, in plain values."""
    return json.dumps(dataclasses.asdict(result), indent=2)


def print_result(result: WholeResult, console: Console) -> None:
    """A row per figure: ours, the peer's, and how many times better ours is."""
    names = list(result.first_token)
    shown = titled(Path(result.path).name)
    for heading in ("", *names, "gain" if len(names) > 1 else ""):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def row(label: str, figures: dict[str, float], form: str, more_is_better: bool) -> None:
        gain = ""
        if len(figures) > 1:
            ours, theirs = (figures[name] for name in names)
            gain = f"{ours / theirs if more_is_better else theirs / ours:.2f}x"
        shown.add_row(label, *(form.format(figures[name]) for name in names), gain)

    for label, rates in result.rates.items():
        row(f"{label}, tokens/s", rates, "{:.1f}", more_is_better=True)
    row("first token after the start, s", result.first_token, "{:.2f}", more_is_better=False)
    mebibytes = {name: {key: value / 2**20 for key, value in held.items()} for name, held in result.memory.items()}
    row("resident, MiB", {name: held["resident"] for name, held in mebibytes.items()}, "{:,.0f}", False)
    beyond = {name: held["resident"] - held["file"] for name, held in mebibytes.items()}
    row("  beyond pages of the file", beyond, "{:,.0f}", more_is_better=False)
    console.print(shown)
    facts = result.machine
    lines = [f"{facts['processor']}, {facts['threads']} threads on {facts['cores']} cores; medians, by turns"]
    if result.logits is not None:
        lines.append(f"logits of the two differ by {result.logits:.1%} (root mean square, of ours)")
    for line in lines + result.notes:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
