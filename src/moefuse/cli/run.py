"""``moefuse run``: text from a model on disk, how fast it came, and how the stock implementation compares."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from moefuse import config

_DTYPES = ("auto", "bfloat16", "float32", "float16")
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
        str, typer.Option(help=f"{', '.join(_DTYPES)}; auto is the checkpoint's, for GGUF bfloat16.")
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
    if dtype not in _DTYPES:
        _stop("--dtype", f"{dtype!r} is not one of {', '.join(_DTYPES)}")
    if model is None:
        model, prompt = _box(), _BOX_PROMPT if prompt is None else prompt
    elif prompt is None:
        _stop("--prompt", "give the text to continue")
    if plot is not None:
        _refuse_plot(plot)
    if parallel == "experts" and (stats or plot is not None):
        _stop("--parallel", "each rank sees its own experts only; ask for --stats and --plot without it")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # Before the first product: torch's own bfloat16 ones kill the process where AMX is advertised and traps.
    if target.type == "cpu":
        config.cap_onednn()
    if threads is not None:
        torch.set_num_threads(threads)
    network, tokenizer = _load(model, dtype, target, parallel, exact)
    if compare:
        _refuse_compare(network, target)
    console = Console(quiet=parallel is not None and torch.distributed.get_rank() != 0)
    tokens = _tokens(tokenizer, prompt, chat).to(target)
    if model == str(_BOX):
        console.print(prompt, end="", markup=False, highlight=False, soft_wrap=True)
    sampling = (temperature, seed)
    _run(console, network, tokenizer, tokens, max_tokens, sampling, against if compare else None, stats, plot)
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
) -> None:
    from moefuse import hf
    from moefuse.hf.text import Generation, expert_load, generate

    def show(text: str) -> None:
        console.print(text, end="", markup=False, highlight=False, soft_wrap=True)

    def rates(name: str, done: Generation) -> None:
        prefill = f"prefill {done.prompt_tokens} tokens at {done.prefill_rate:.1f}/s"
        decode = f"decode {done.decode_tokens} tokens at {done.decode_rate:.1f}/s"
        console.print(f"{name}: {prefill}, {decode}", highlight=False)

    def warm_up() -> None:
        """What the first call alone pays for must not tell two implementations apart."""
        if against is not None:
            with torch.no_grad():
                model(input_ids=prompt)

    report = hf.patch(model)
    warm_up()
    ours = generate(model, tokenizer, prompt, max_tokens, show, *sampling, to_the_end=against is not None)
    console.print()
    rates("moefuse", ours)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    if stats or plot is not None:
        load = expert_load(model, ours.tokens)
        if stats:
            _print_load(console, load)
        if plot is not None and not console.quiet:
            _draw_load(load, plot)
            console.print(f"picture: {plot}", highlight=False)
    if against is not None:
        with torch.no_grad():
            logits = model(input_ids=ours.tokens).logits.float()
            hf.unpatch(model)
            hf.dequantize(model)
            _use(model, against)
            stock_logits = model(input_ids=ours.tokens).logits.float()
        warm_up()
        stock = generate(model, tokenizer, prompt, max_tokens, lambda _: None, *sampling, to_the_end=True)
        rates(against, stock)
        largest, size = float((logits - stock_logits).abs().max()), float(stock_logits.abs().max())
        decode = f", decode {ours.decode_rate / stock.decode_rate:.2f}x" if stock.decode_rate else ""
        console.print(f"largest logit difference {largest:.2e}, of logits up to {size:.1f}", highlight=False)
        console.print(f"speed against {against}: prefill {ours.prefill_rate / stock.prefill_rate:.2f}x{decode}",
                      highlight=False)  # fmt: skip


def _stop(hint: str, message: str) -> NoReturn:
    raise typer.BadParameter(message, param_hint=hint)


def _box() -> str:
    if not _BOX.is_file():
        _stop("MODEL", "this install came without the model in the box: name a directory or a GGUF file")
    return str(_BOX)


def _load(path: str, dtype: str, device: torch.device, parallel: str | None, exact: bool) -> tuple[Any, Any]:
    try:
        from moefuse import hf
        from moefuse.hf.load import load
    except ImportError as error:
        _stop("MODEL", str(error))
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
            _stop("MODEL", str(error))
    answer = hf.supports(model)
    if not answer:
        _stop("MODEL", f"{answer.reason}; run it with transformers alone")
    return model, tokenizer


def _tokens(tokenizer: Any, prompt: str, chat: bool) -> Tensor:
    if not chat:
        tokens: Tensor = tokenizer(prompt, return_tensors="pt").input_ids
    elif tokenizer.chat_template is None:
        _stop("--chat", "the model's tokenizer has no chat template; leave --chat out")
    else:
        turns = [{"role": "user", "content": prompt}]
        filled = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        tokens = filled["input_ids"]
    if tokens.shape[1] == 0:
        _stop("--prompt", "it has no tokens; give some text")
    return tokens


def _use(model: Any, implementation: str) -> None:
    try:
        model.set_experts_implementation(implementation)
    except ValueError as error:
        _stop("--against", str(error).splitlines()[0])


def _refuse_compare(model: Any, device: torch.device) -> None:
    """The stock implementations want the experts of a GGUF file as numbers, several times their size."""
    from moefuse.hf.block_experts import dequantized_bytes

    needed, free = dequantized_bytes(model), _free_memory(device)
    if free is not None and needed > free:
        _stop("--compare", f"the experts as numbers take {needed / 2**30:.1f} GiB and {free / 2**30:.1f} are free; "
              "leave --compare out")  # fmt: skip


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
        _stop("--plot", f"the file must end in .png, got {plot}")
    if not plot.parent.is_dir():
        _stop("--plot", f"there is no folder {plot.parent} to write {plot.name} into")
    missing = report.plot_unavailable()
    if missing is not None:
        _stop("--plot", missing)


def _print_load(console: Console, load: dict[str, Tensor]) -> None:
    """One row per layer, one cell per expert or per few of them, dark where the load is high."""
    console.print("\nload of the experts: blank is unused, full is twice the even share or more")
    for path, counts in load.items():
        even = counts.sum() / len(counts)
        room = max(console.width - 44, 16)
        cells = [part.max() for part in counts.tensor_split(min(len(counts), room))]
        row = Text(path.removesuffix(".experts")[-24:].rjust(24) + " ")
        for cell in cells:
            share = min(float(cell / (2 * even)), 1.0)
            shade = _SHADES[0 if cell == 0 else min(1 + int(share * 4), 4)]
            row.append(shade, style=f"rgb({int(80 + 175 * share)},{int(160 - 60 * share)},{int(200 - 160 * share)})")
        row.append(f" max {float(counts.max() / even):4.1f}x  unused {int((counts == 0).sum())}")
        console.print(row, highlight=False, soft_wrap=True)


def _draw_load(load: dict[str, Tensor], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    widest = max(len(counts) for counts in load.values())
    shares = torch.full((len(load), widest), float("nan"))
    for row, counts in enumerate(load.values()):
        shares[row, : len(counts)] = counts * len(counts) / counts.sum()
    figure, axes = pyplot.subplots(figsize=(10, 1.5 + 0.18 * len(load)), layout="constrained")
    picture = axes.imshow(shares.numpy(), aspect="auto", cmap="viridis", interpolation="nearest", vmin=0)
    figure.colorbar(picture, label="load, in even shares")
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
