"""``moefuse bench``: ours, the peers and the floor on a model's layer or on a case."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from moefuse import backends, config
from moefuse.bench import case as bench_cases
from moefuse.bench import inputs, machine, peers, report, whole
from moefuse.bench.result import Result
from moefuse.bench.run import Options, bench_formats, bench_shape, held
from moefuse.cli import options
from moefuse.testing.cases import CASES

_TRAINING = "Time forward and backward of the experts; with --weights, of adapters on them, beside frozen numbers."
_TOKENS, _PROMPTS = "1,16,512", "512,64"
_PEERS = "hf-grouped,hf-batched,hf-eager"


def bench(
    model: Annotated[
        str | None, typer.Argument(help=f"{options.MODEL} Or a GGUF file, which is timed whole.", show_default=False)
    ] = None,
    experts: options.Experts = None,
    hidden: options.Hidden = None,
    intermediate: options.Intermediate = None,
    top_k: options.TopK = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help=f"Token counts, with commas between; without it, {_TOKENS}, and {_PROMPTS} for prompts of a file."
        ),
    ] = None,
    dtype: options.Dtype = "bfloat16",
    weights: options.Weights = None,
    against: Annotated[
        str | None,
        typer.Option(help=f"Peers, with commas between, or none; without it, {_PEERS}; for a file llama-cpp or none."),
    ] = None,
    library: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's library or its folder, for a file; without it, that of llama-cpp-python."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="Our backend; by default the device's.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; without it, cuda where there is one.")] = None,
    case: Annotated[
        str | None, typer.Option(help="Time a case of the case table instead, such as experts/few.")
    ] = None,
    training: Annotated[bool, typer.Option("--training", help=_TRAINING)] = False,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds per token count, instead of a budget.")] = None,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds of timing per token count; at least 5 rounds.")] = 5.0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures, the machine and the command as plain data.")
    ] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write that plain data into this file; a .md gets the formats of --weights as a table."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time against tokens into this .png.")] = None,
) -> None:
    """Time a mixture-of-experts layer: ours, the peers, and the least the machine allows; or a whole GGUF model.

    Every result of a layer is compared with float64 first; what is wrong gets no figure, and exit code 1 if it is ours.
    """
    sizes = (experts, hidden, intermediate, top_k)
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    if model is not None and model.endswith(".gguf"):
        for option, value in {
            "sizes": next((size for size in sizes if size is not None), None), "--weights": weights, "--case": case,
            "--backend": backend, "--training": training or None, "--plot": plot,
            "--dtype": None if dtype == "bfloat16" else dtype, "--device": None if device == "cpu" else device,
        }.items():  # fmt: skip
            if value is not None:
                options.stop(option, "a GGUF file is timed whole, as moefuse run runs it on the CPU: leave it out")
        _refuse_output(save, None, None)
        rounds = whole.ROUNDS if repeat is None else repeat
        _whole(
            Path(model), options.tokens(tokens or _PROMPTS), against, library, rounds, threads, command, as_json, save
        )
        return
    if library is not None:
        options.stop("--library", "it is for a GGUF file; a layer is timed with the libraries of llama-cpp-python")
    settings = Options(
        dtype=options.dtype(dtype),
        device=options.device(device),
        backend=backend if backend is None else options.known("--backend", backend, backends.names()),
        repeat=repeat,
        budget=budget,
        command=command,
        training=training,
    )
    _refuse_output(save, plot, case)
    if save is not None and save.suffix == ".md" and weights is None:
        options.stop("--save", "a .md is a table of the formats of --weights")
    if training and plot is not None:
        options.stop("--plot", "it draws the forward alone; leave out --training")
    # Before the first product: torch's own bfloat16 ones kill the process where AMX is advertised and traps.
    capped = config.cap_onednn() if settings.device.type == "cpu" else None
    busy = machine.busy()
    if threads is not None:
        torch.set_num_threads(threads)
    if case is not None:
        if model is not None or weights is not None or any(size is not None for size in sizes):
            options.stop("--case", "give a case or a model, not both")
        if training:
            options.stop("--training", "a case has no training step; give a model or sizes")
        chosen = bench_cases.find(options.known("--case", case, [known.id for known in CASES]))
        if settings.dtype not in chosen.dtypes:
            options.stop("--dtype", f"case {chosen.id} is not for {dtype}")
        results = _run(lambda tick: [bench_cases.bench_case(chosen, settings, tick)])
    else:
        counts, rivals = options.tokens(tokens or _TOKENS), [peers.load(name) for name in _peers(against or _PEERS)]
        shape = options.shape(model, sizes)
        shapes = [shape] if weights is None else options.in_blocks(shape, weights)
        if plot is not None and len(shapes) > 1:
            options.stop("--plot", "it draws one format; give --weights one")
        needed = [inputs.fits(held(each, settings), settings.dtype, settings.device) for each in shapes]
        refusal = next(filter(None, needed), None)
        if refusal is not None:
            options.stop("MODEL", refusal)
        if weights is None:
            results = _run(lambda tick: [bench_shape(shape, counts, rivals, settings, tick)])
        else:
            results = _run(lambda tick: bench_formats(shapes, counts, rivals, settings, tick))
    for result in results:
        result.notes += [note for note in (capped, busy) if note is not None]
    if as_json:
        typer.echo(report.as_text(results))
    else:
        console = Console()
        # A pipe or a file has no width of its own.
        console = console if console.is_terminal else Console(width=120)
        if len(results) == 1:
            report.print_result(results[0], console)
        else:
            report.print_matrix(results, console)
    if save is not None:
        text = report.page(results) if save.suffix == ".md" else report.as_text(results) + "\n"
        save.write_text(text, encoding="utf-8")
    if plot is not None:
        from moefuse.bench.plot import write_plot

        write_plot(results[0], plot)
    if not as_json:
        for what, path in (("figures", save), ("picture", plot)):
            if path is not None:
                typer.echo(f"{what}: {path}")
    if any(result.ours_failed for result in results):
        raise typer.Exit(1)


def _whole(
    path: Path,
    prompts: list[int],
    against: str | None,
    library: Path | None,
    rounds: int,
    threads: int | None,
    command: str,
    as_json: bool,
    save: Path | None,
) -> None:
    """A GGUF file, from its first byte to its tokens."""
    asked = against or ("none" if library is None else whole.LLAMA_CPP)
    busy = machine.busy()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        found = None
        if options.known("--against", asked, (whole.LLAMA_CPP, "none")) != "none":
            found = whole.find_library(library)
    except ValueError as error:
        options.stop("--against" if library is None else "--library", str(error))
    with options.progress() as tick:
        try:
            result = whole.bench_file(path, prompts, found, rounds, command, tick)
        except ValueError as error:
            options.stop("MODEL", str(error))
    result.notes += [] if busy is None else [busy]
    text = whole.as_text(result)
    if as_json:
        typer.echo(text)
    else:
        whole.print_result(result, Console())
    if save is not None:
        save.write_text(text + "\n", encoding="utf-8")
        if not as_json:
            typer.echo(f"figures: {save}")


def _peers(text: str) -> list[str]:
    asked = [part.strip() for part in text.split(",") if part.strip()]
    return [] if asked == ["none"] else [options.known("--against", name, peers.names()) for name in asked]


def _refuse_output(save: Path | None, plot: Path | None, case: str | None) -> None:
    """Say what cannot be written before minutes are spent measuring it."""
    for hint, path in (("--save", save), ("--plot", plot)):
        if path is not None and not path.parent.is_dir():
            options.stop(hint, f"there is no folder {path.parent} to write {path.name} into")
    if plot is None:
        return
    if case is not None:
        options.stop("--plot", "it draws time against tokens, and a case has one size")
    if plot.suffix.lower() != ".png":
        options.stop("--plot", f"the file must end in .png, got {plot}")
    missing = report.plot_unavailable()
    if missing is not None:
        options.stop("--plot", missing)


def _run(work: Callable[[Callable[[str, float], None]], list[Result]]) -> list[Result]:
    with options.progress() as tick:
        try:
            return work(tick)
        except ValueError as error:
            # A backend that was asked for by name and cannot run says so when it is first selected.
            options.stop("--backend", str(error))
