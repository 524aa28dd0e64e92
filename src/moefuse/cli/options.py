"""What the commands that take a model's layer have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from moefuse import backends, config
from moefuse.bench import shapes
from moefuse.quant.arrange import INTERLEAVED, can_interleave
from moefuse.quant.formats import FORMATS
from moefuse.types import dtype_named

DTYPES = ("bfloat16", "float32", "float16")
DEFAULT_MODEL = "qwen3-30b-a3b"

MODEL = f"One of {', '.join(shapes.names())}; without it, {DEFAULT_MODEL}."
Model = Annotated[str | None, typer.Argument(help=MODEL, show_default=False)]
Experts = Annotated[int | None, typer.Option(help="Instead of a model, its sizes: experts,")]
Hidden = Annotated[int | None, typer.Option(help="hidden size,")]
Intermediate = Annotated[int | None, typer.Option(help="intermediate size of one expert,")]
TopK = Annotated[int | None, typer.Option(help="and experts per token.")]
Tokens = Annotated[str, typer.Option(help="Token counts, with commas between.")]
Weights = Annotated[
    str | None,
    typer.Option(
        help="Experts in GGUF blocks: formats with commas between, or all; Q4_K/Q6_K for gate_up and down, "
        "Q4_K:exact keeps x in f32, Q4_K:interleaved lies as the CPU reads it best."
    ),
]
Dtype = Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")]


def stop(hint: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=hint)


def known(hint: str, name: str, valid: Iterable[str]) -> str:
    if name not in valid:
        stop(hint, f"{name!r} is not one of {', '.join(valid)}")
    return name


def environment() -> None:
    """Stop where a variable asks for what there is not."""
    forced = config.backend()
    if forced is not None:
        known("MOEFUSE_BACKEND", forced, backends.names())
    try:
        config.invariant()
    except ValueError as error:
        stop("MOEFUSE_INVARIANT", str(error))
    try:
        next(row for row in backends.BACKENDS if row.name == "cpu").missing()
    except ValueError as error:
        stop("MOEFUSE_CPU_ISA", str(error))


def dtype(name: str) -> torch.dtype:
    found = dtype_named(name)
    if found is None:
        stop("--dtype", f"{name!r} is not one of {', '.join(DTYPES)}")
    return found


def device(name: str | None) -> torch.device:
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name is None:
        return torch.device("cuda" if found["cuda"] else "cpu")
    kind = name.split(":")[0]
    known("--device", kind, found)
    if not found[kind]:
        stop("--device", f"no {kind} device here; there are: {', '.join(k for k, here in found.items() if here)}")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        stop("--device", f"{name!r} is not a device")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if chosen.index is not None and chosen.index >= count:
        stop("--device", f"there {'is 1' if count == 1 else f'are {count}'} of {kind}, counted from 0, got {name}")
    return chosen


def tokens(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        stop("--tokens", f"positive whole numbers with commas between, got {text!r}")
    return [int(part) for part in parts]


def shape(model: str | None, sizes: tuple[int | None, ...]) -> shapes.Shape:
    given = [size for size in sizes if size is not None]
    if not given:
        try:
            return shapes.find(model or DEFAULT_MODEL)
        except KeyError:
            stop("MODEL", f"{model!r} is not one of {', '.join(shapes.names())}")
    if model is not None:
        stop("MODEL", "give a model or sizes, not both")
    if len(given) != len(sizes):
        stop("sizes", "all of --experts, --hidden, --intermediate and --top-k are needed")
    try:
        return shapes.Shape("custom", experts=given[0], hidden=given[1], intermediate=given[2], top_k=given[3])
    except ValueError as error:
        stop("sizes", str(error))


def in_blocks(shape: shapes.Shape, weights: str) -> list[shapes.Shape]:
    """The layer in each of the formats that ``--weights`` asks for."""
    found: list[shapes.Shape] = []
    for part in weights.split(","):
        name, _, mode = part.strip().partition(":")
        if name == "all":
            found += _in_every_format(shape, f":{mode}" if mode else "")
            continue
        specs = [spec.strip() for spec in part.split("/")]
        if len(specs) > 2:
            stop("--weights", f"one format, or one for gate_up and one for down as in Q4_K/Q6_K, got {part!r}")
        try:
            found.append(shape.in_blocks(specs[0], specs[-1]))
        except ValueError as error:
            stop("--weights", str(error))
    return list(dict.fromkeys(found))


def _in_every_format(shape: shapes.Shape, mode: str) -> list[shapes.Shape]:
    """Those whose blocks its rows are made of, fewest bits first."""
    fitting = [
        form
        for form in sorted(FORMATS.values(), key=lambda form: form.bits)
        if shape.hidden % form.values == shape.intermediate % form.values == 0
        and (INTERLEAVED not in mode or can_interleave(form.name, shape.rows))
    ]
    if not fitting:
        stop("--weights", f"no format has blocks that fill rows of {shape.hidden} and {shape.intermediate}")
    try:
        return [shape.in_blocks(form.name + mode, form.name + mode) for form in fitting]
    except ValueError as error:
        stop("--weights", str(error))


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("starting", total=1.0)
        yield lambda label, share: shown.update(task, description=label, completed=share)
