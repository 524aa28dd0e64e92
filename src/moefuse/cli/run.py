"""``moefuse run``: text from a model on disk, how fast it came, and how the stock implementation compares."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from moefuse import config
from moefuse.cli import options
from moefuse.ops._core.select import resolve

_SHADES = " ░▒▓█"
#: the model in the box, which an install may lack, and what it continues
_BOX = Path(__file__).parents[1] / "box" / "box.gguf"
_BOX_PROMPT = "And it came to pass in those days, that"


def run(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory of a transformers model or a GGUF file; without it, the model in the box."),
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text to continue; the model in the box has one.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    chat: Annotated[bool, typer.Option(help="Put the prompt into the model's chat template.")] = False,
    dtype: Annotated[
        str, typer.Option(help=f"auto, {', '.join(options.DTYPES)}; auto is the checkpoint's, for GGUF bfloat16.")
    ] = "auto",
    exact: Annotated[bool, typer.Option(help="GGUF: do not round activations to 8 bits; slower.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; without it, cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    compare: Annotated[bool, typer.Option(help="Also run the stock implementation: logits and speed.")] = False,
    against: Annotated[str, typer.Option(help="The stock implementation to compare with.")] = "grouped_mm",
    stats: Annotated[bool, typer.Option(help="Show how the experts of each layer are loaded.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the experts' load into this .png.")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: tensor or experts, split over the ranks.")
    ] = None,
) -> None:
    """Continue a prompt with a mixture-of-experts model on moefuse, and say how fast."""
    numbers = "auto" if dtype == "auto" else options.dtype(dtype)
    if model is None:
        model, prompt = _box(), _BOX_PROMPT if prompt is None else prompt
    elif prompt is None:
        options.stop("--prompt", "give the text to continue")
    if plot is not None:
        _refuse_plot(plot)
    if parallel is not None:
        _refuse_parallel(model, parallel, stats or plot is not None)
    target = options.device(device)
    try:
        resolve("experts", target.type, torch.bfloat16)
    except ValueError as error:
        options.stop("MOEFUSE_BACKEND", str(error))
    # Before the first product: torch's own bfloat16 ones kill the process where AMX is advertised and traps.
    if target.type == "cpu":
        config.cap_onednn()
    if threads is not None:
        torch.set_num_threads(threads)
    network, tokenizer = _load(model, numbers, target, parallel, exact)
    if compare:
        _refuse_compare(network, target)
    console = Console(quiet=parallel is not None and torch.distributed.get_rank() != 0)
    tokens = _tokens(tokenizer, prompt, chat).to(target)
    if model == str(_BOX):
        console.print(prompt, end="", markup=False, highlight=False, soft_wrap=True)
    sampling = (temperature, seed)
    _run(console, network, tokenizer, tokens, max_tokens, sampling, against if compare else None, stats, plot, model)
    if parallel is not None:
        torch.distributed.destroy_process_group()


def _run(
    console: Console,
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    max_tokens: int,
    sampling: tuple[float, int],
    against: str | None,
    stats: bool,
    plot: Path | None,
    title: str,
) -> None:
    from moefuse import hf
    from moefuse.hf.text import Generation, NotFinite, expert_load, generate, refuse_not_finite

    def show(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def rates(name: str, done: Generation) -> None:
        prefill = f"prefill {_tokens_of(done.prompt_tokens)} at {done.prefill_rate:.1f}/s"
        decode = f"decode {_tokens_of(done.decode_tokens)} at {done.decode_rate:.1f}/s"
        console.print(f"{name}: {prefill}, {decode}", highlight=False)

    def warm_up() -> None:
        """What the first call alone pays for must not tell two implementations apart."""
        if against is not None:
            with torch.no_grad():
                model(input_ids=prompt)

    def written(name: str, show: Callable[[str], None], to_the_end: bool) -> Generation:
        try:
            return generate(model, tokenizer, prompt, max_tokens, show, *sampling, to_the_end=to_the_end)
        except NotFinite as error:
            _give_up(name, error)

    def logits_of(name: str, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens).logits.float()
        try:
            refuse_not_finite(model, tokens, logits)
        except NotFinite as error:
            _give_up(name, error)
        return logits

    report = hf.patch(model)
    warm_up()
    ours = written("moefuse", show, against is not None)
    console.print()
    rates("moefuse", ours)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if stats or plot is not None:
        load = expert_load(model, ours.tokens)
        if stats:
            _print_load(console, load)
        if plot is not None and not console.quiet:
            _draw_load(load, plot, f"{Path(title).name}, {_tokens_of(ours.tokens.shape[1])}")
            console.print(f"picture: {plot}", highlight=False)
    if against is not None:
        logits = logits_of("moefuse", ours.tokens)
        hf.unpatch(model)
        hf.dequantize(model)
        _use(model, against)
        stock_logits = logits_of(against, ours.tokens)
        warm_up()
        stock = written(against, lambda _: None, True)
        rates(against, stock)
        largest, size = float((logits - stock_logits).abs().max()), float(stock_logits.abs().max())
        decode = f", decode {ours.decode_rate / stock.decode_rate:.2f}x" if stock.decode_rate else ""
        console.print(f"largest logit difference {largest:.2e}, of logits up to {size:.1f}", highlight=False)
        prefill = f"prefill {ours.prefill_rate / stock.prefill_rate:.2f}x"
        console.print(f"speed against {against}: {prefill}{decode}", highlight=False)


def _tokens_of(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _give_up(name: str, error: Exception) -> NoReturn:
    """The answer is none: say why, and fail."""
    said = f"{name}: {error}; the weights of the model are damaged, or {name} computes them wrong"
    Console(stderr=True).print(f"\n{said}", markup=False, highlight=False, style="red", soft_wrap=True)
    raise typer.Exit(1)


def _refuse_parallel(model: str, parallel: str, shows_load: bool) -> None:
    options.known("--parallel", parallel, ("tensor", "experts"))
    if model.endswith(".gguf"):
        options.stop("--parallel", "a GGUF file is not split over ranks: give the directory of a transformers model")
    if parallel == "experts" and shows_load:
        options.stop("--parallel", "each rank sees its own experts only; ask for --stats and --plot without it")
    if not torch.distributed.is_torchelastic_launched():
        options.stop("--parallel", "it needs ranks: start with torchrun --nproc-per-node RANKS -m moefuse run ...")


def _box() -> str:
    if not _BOX.is_file():
        options.stop("MODEL", "this install came without the model in the box: name a directory or a GGUF file")
    return str(_BOX)


def _load(
    path: str, dtype: str | torch.dtype, device: torch.device, parallel: str | None, exact: bool
) -> tuple[Any, Any]:
    try:
        from moefuse import hf
        from moefuse.hf.load import load
    except ImportError as error:
        options.stop("MODEL", str(error))
    from transformers.utils import logging

    transformers_logging: Any = logging  # untyped
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    # A GGUF file is loaded under a bar of its own.
    waiting = nullcontext() if path.endswith(".gguf") else Console(stderr=True).status(f"loading {path}")
    with waiting:
        try:
            model, tokenizer = load(path, dtype=dtype, device=device, parallel=parallel, exact=exact)
        except ValueError as error:
            options.stop("MODEL", str(error))
    answer = hf.supports(model)
    if not answer:
        options.stop("MODEL", f"{answer.reason}; run it with transformers alone")
    return model, tokenizer


def _tokens(tokenizer: Any, prompt: str, chat: bool) -> Tensor:
    if not chat:
        tokens: Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    elif tokenizer.chat_template is None:
        options.stop("--chat", "the model's tokenizer has no chat template; leave --chat out")
    else:
        turns = [{"role": "user", "content": prompt}]
        filled = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = filled["input_ids"]
    if tokens.shape[1] == 0:
        options.stop("--prompt", "it has no tokens; give some text")
    return tokens


def _use(model: Any, implementation: str) -> None:
    try:
        model.set_experts_implementation(implementation)
    except ValueError as error:
        options.stop("--against", str(error).splitlines()[0])


def _refuse_compare(model: Any, device: torch.device) -> None:
    """The stock implementations want the experts of a GGUF file as numbers, several times their size."""
    from moefuse.hf.gguf_experts import dequantized_bytes

    needed, free = dequantized_bytes(model), _free_memory(device)
    if free is not None and needed > free:
        sizes = f"{needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free"
        options.stop("--compare", f"the experts as numbers take {sizes}; leave --compare out")


def _free_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = Path("/proc/meminfo")
    if device.type != "cpu" or not known.exists():
        return None
    return int(known.read_text().split("MemAvailable:")[1].split()[0]) * 1024


def _refuse_plot(plot: Path) -> None:
    from moefuse.bench import report

    if plot.suffix.lower() != ".png":
        options.stop("--plot", f"the file must end in .png, got {plot}")
    if not plot.parent.is_dir():
        options.stop("--plot", f"there is no folder {plot.parent} to write {plot.name} into")
    missing = report.plot_unavailable()
    if missing is not None:
        options.stop("--plot", missing)


def _print_load(console: Console, load: dict[str, Tensor]) -> None:
    """One row per layer, one cell per expert or per few of them, dark where the load is high."""
    console.print("\nload of the experts: blank is unused, full is twice the even share or more")
    label = 24 if console.width >= 72 else 10
    for path, counts in load.items():
        even = counts.sum() / len(counts)
        room = max(console.width - label - 24, 16)
        cells = [part.max() for part in counts.tensor_split(min(len(counts), room))]
        name = path.removesuffix(".experts") if label > 10 else f"layer {_layer_of(path)}"
        row = Text(name[-label:].rjust(label) + " ")
        for cell in cells:
            share = min(float(cell / (2 * even)), 1.0)
            shade = _SHADES[0 if cell == 0 else min(1 + int(share * 4), 4)]
            row.append(shade, style=f"rgb({int(80 + 175 * share)},{int(160 - 60 * share)},{int(200 - 160 * share)})")
        row.append(f" max {float(counts.max() / even):4.1f}x  unused {int((counts == 0).sum())}")
        console.print(row, highlight=False, soft_wrap=True)


def _layer_of(path: str) -> str:
    """The number of a layer in a module's path, or the path where it has none."""
    return next((part for part in path.split(".") if part.isdecimal()), path)


def _draw_load(load: dict[str, Tensor], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    widest = max(len(counts) for counts in load.values())
    shares = torch.full((len(load), widest), float("nan"))
    for row, counts in enumerate(load.values()):
        shares[row, : len(counts)] = counts * len(counts) / counts.sum()
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.18 * len(load)), layout="constrained")
    picture = axes.imshow(shares.numpy(), aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(picture, label="load, in even shares")
    axes.set_title(f"Load of the experts: {title}", fontsize=10, loc="left")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    layers = [_layer_of(path) for path in load]
    rows = range(0, len(layers), -(-len(layers) // 24))
    axes.set_yticks(rows, [layers[row] for row in rows])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
