"""``moefuse run``: text from a model on disk, how fast it came, and how the stock implementation compares."""

from __future__ import annotations

import functools
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from moefuse import config
from moefuse.bench.light import many_imports, without_compiler
from moefuse.cli import options
from moefuse.ops._core.select import resolve

if TYPE_CHECKING:
    from moefuse.hf.text import Generation

_SHADES = " ░▒▓█"
#: the model in the box, which an install may lack, and what it continues
_BOX = Path(__file__).parents[1] / "box" / "box.gguf"
_BOX_PROMPT = "And it came to pass in those days, that"
#: tokens of a conversation, where its model takes as many
_PLACES = 4096


def run(
    model: Annotated[
        str | None,
        typer.Argument(help="Directory of a transformers model or a GGUF file; without it, the model in the box."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Text to continue, and again for several at once; the model in the box has one."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of sampling.")] = 0,
    chat: Annotated[
        bool, typer.Option(help="Put the prompt into the model's chat template; without a prompt, a conversation.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help=f"auto, {', '.join(options.DTYPES)}; auto is the checkpoint's, for GGUF bfloat16.")
    ] = "auto",
    weights: Annotated[
        str | None, typer.Option(help="Put the experts of a directory into this format, such as Q4_K, while loading.")
    ] = None,
    exact: Annotated[bool, typer.Option(help="Blocks: do not round activations to 8 bits; slower.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or mps; without it, cuda where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads, of torch and of moefuse.")] = None,
    experts_on: Annotated[
        str | None, typer.Option(help="auto or cpu: experts stay in RAM; auto puts as many on the GPU as fit.")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="What to take of the GPU, such as 12GiB; other experts stay in RAM.")
    ] = None,
    no_capture: Annotated[
        bool, typer.Option("--no-capture", help="Decode in transformers' own loop, over its own cache.")
    ] = False,
    compare: Annotated[bool, typer.Option(help="Also run the stock implementation: logits and speed.")] = False,
    against: Annotated[str, typer.Option(help="The stock implementation to compare with.")] = "grouped_mm",
    stats: Annotated[
        bool, typer.Option(help="Show how the experts of each layer are loaded, and what lies where.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the experts' load into this .png.")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: tensor or experts, split over the ranks.")
    ] = None,
) -> None:
    """Continue prompts with a mixture-of-experts model on moefuse, or talk with it, and say how fast."""
    numbers = "auto" if dtype == "auto" else options.dtype(dtype)
    texts = prompt or ([_BOX_PROMPT] if model is None and not chat else [])
    if model is None:
        model = _box()
    elif not texts and not chat:
        options.stop("--prompt", "give the text to continue, or --chat for a conversation")
    if not texts and (compare or stats or plot is not None or parallel is not None):
        options.stop("--chat", "a conversation has no --compare, --stats, --plot or --parallel; give a --prompt")
    if plot is not None:
        _refuse_plot(plot)
    if parallel is not None:
        _refuse_parallel(model, parallel, stats or plot is not None)
    target = options.device(device)
    if experts_on is not None or gpu_memory is not None:
        _refuse_placement(experts_on, gpu_memory, target, parallel, compare)
    try:
        resolve("experts", target.type, torch.bfloat16)
    except ValueError as error:
        options.stop("MOEFUSE_BACKEND", str(error))
    # Before the first product: torch's own bfloat16 ones kill the process where AMX is advertised and traps.
    if target.type == "cpu":
        config.cap_onednn()
    if threads is not None:
        torch.set_num_threads(threads)  # those of our kernels, too
    how = {"exact": exact, "weights": weights, "experts": experts_on, "gpu_memory": gpu_memory}
    network, tokenizer = _load(model, device=target, dtype=numbers, parallel=parallel, **how)
    if compare:
        _refuse_compare(network, target)
    console = Console(quiet=parallel is not None and torch.distributed.get_rank() != 0)
    prompts = [_tokens(tokenizer, [_turn("user", text)] if chat else text).to(target) for text in texts]
    if prompts:
        places = max(map(len, prompts)) + max_tokens
    else:
        _tokens(tokenizer, [_turn("user", "?")])  # there must be a template
        places = min(getattr(network.config.get_text_config(), "max_position_embeddings", _PLACES), _PLACES)
    reason = "the model is split over ranks" if parallel is not None else "--no-capture" if no_capture else None
    prepared = _prepare(network, max(len(prompts), 1), places, reason)
    write = functools.partial(_write, console, network, tokenizer, sampling=(temperature, seed))
    if prompts:
        if model == str(_BOX) and len(texts) == 1:
            _show(console, *texts)
        turns = [write(prompts, texts, max_tokens, to_the_end=compare, warm=compare)]
    else:
        turns = _converse(console, tokenizer, target, places, max_tokens, write)
    _close(console, turns, prepared, target)
    if stats and hasattr(network, "_moefuse_placement"):
        console.print(str(network._moefuse_placement), markup=False, highlight=False, soft_wrap=True)
    if stats or plot is not None:
        _show_load(console, network, turns[-1].tokens, stats, plot, model)
    if compare:
        _compare(console, network, turns[-1], against, functools.partial(write, prompts, texts, max_tokens))
    if parallel is not None:
        torch.distributed.destroy_process_group()


def _prepare(model: Any, batch: int, places: int, uncaptured: str | None) -> str:
    """Patch the model and capture its decode step, unless there is a reason not to; what came of it, in words."""
    from moefuse import hf

    report = hf.patch(model)
    if uncaptured is None:
        try:
            return f"{report}\n{hf.capture(model, batch, places)}"
        except (ValueError, RuntimeError) as error:
            uncaptured = (str(error).strip() or type(error).__name__).splitlines()[0].removeprefix("capture: ")
    return f"{report}\ndecode step not captured: {uncaptured}"


def _show(console: Console, text: str, end: str = "") -> None:
    if not console.quiet:
        print(text, end=end, flush=True)


def _write(
    console: Console,
    model: Any,
    tokenizer: Any,
    prompts: list[Tensor],
    texts: list[str],
    max_tokens: int,
    *,
    sampling: tuple[float, int],
    name: str = "moefuse",
    quiet: bool = False,
    to_the_end: bool = False,
    conversation: bool = False,
    warm: bool = False,
) -> Generation:
    """Continue prompts. Text of one is shown as it comes, that of several under each when it is done.

    ``warm`` writes two tokens first: what the first call alone pays for must not tell two implementations apart.
    """
    from moefuse.hf.text import PIECE, NotFinite, generate

    def show(row: int, text: str) -> None:
        if quiet:
            return
        if len(texts) == 1:
            _show(console, text)
        else:
            console.print(texts[row], style="bold", markup=False, highlight=False, soft_wrap=True)
            _show(console, text.strip(), "\n")

    longest = max(map(len, prompts))
    options = {"to_the_end": to_the_end, "conversation": conversation}
    try:
        if warm:
            generate(model, tokenizer, prompts, min(2, max_tokens), lambda *_: None, *sampling)
        with ExitStack() as stack:
            long = longest > PIECE and not quiet and Console(stderr=True).is_terminal and not console.quiet
            progress = _progress(stack, longest) if long and hasattr(model, "_moefuse_steps") else None
            return generate(model, tokenizer, prompts, max_tokens, show, *sampling, progress=progress, **options)
    except NotFinite as error:
        _give_up(name, error)


def _progress(stack: ExitStack, length: int) -> Callable[[int], None]:
    """A bar for the tokens of a long prompt, which is gone when all are done."""
    show = stack.enter_context(options.progress())

    def report(done: int) -> None:
        show(f"prompt: {done} of {length} tokens", done / length)
        if done == length:
            stack.close()

    show(f"prompt: 0 of {length} tokens", 0.0)
    return report


def _converse(
    console: Console,
    tokenizer: Any,
    device: torch.device,
    places: int,
    max_tokens: int,
    write: Callable[..., Generation],
) -> list[Generation]:
    """Read lines and answer them until there are no more, or no more places."""
    turns: list[dict[str, str]] = []
    done: list[Generation] = []
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            _show(console, "\n")
            return done
        if not text:
            continue
        turns.append(_turn("user", text))
        tokens = _tokens(tokenizer, turns).to(device)
        room = places - len(tokens)
        if room > 0:
            done.append(write([tokens], [text], min(max_tokens, room), conversation=True))
            (answer,) = done[-1].texts
            turns.append(_turn("assistant", answer))
            _show(console, "\n")
        if room <= 0 or len(done[-1].tokens[0]) == places:
            console.print(f"the conversation ends: its {places} places are full", highlight=False)
            return done


def _close(console: Console, turns: list[Generation], prepared: str, device: torch.device) -> None:
    """The last lines: rates, the time to the first token, memory, and how the model was run."""
    from moefuse.hf.text import joined

    if turns:
        console.print()
        _print_rates(console, "moefuse", joined(turns))
        first = f"first token {turns[0].prefill_seconds:.2f} s after its prompt"
        age = _age()
        if age is not None:
            first += f", {age - (time.perf_counter() - turns[0].first_token):.1f} s after the start of the command"
        console.print(first, highlight=False, soft_wrap=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    memory = f"peak memory {peak / 2**20:,.0f} MiB resident"
    if device.type == "cuda":
        memory += f", {torch.cuda.max_memory_reserved(device) / 2**20:,.0f} MiB on the GPU"
    console.print(memory, highlight=False)
    console.print(prepared, markup=False, highlight=False, soft_wrap=True)


def _age() -> float | None:
    """Seconds since this process was started, where the system tells."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _print_rates(console: Console, name: str, done: Generation) -> None:
    prefill = f"prefill {_tokens_of(done.prompt_tokens)} at {done.prefill_rate:.1f}/s"
    decode = f"decode {_tokens_of(done.decode_tokens)} at {done.decode_rate:.1f}/s"
    console.print(f"{name}: {prefill}, {decode}", highlight=False)


def _show_load(
    console: Console, model: Any, sequences: list[Tensor], stats: bool, plot: Path | None, title: str
) -> None:
    from moefuse.hf.text import expert_load

    load = expert_load(model, sequences)
    if stats:
        _print_load(console, load)
    if plot is not None and not console.quiet:
        _draw_load(load, plot, f"{Path(title).name}, {_tokens_of(sum(map(len, sequences)))}")
        console.print(f"picture: {plot}", highlight=False)


def _compare(console: Console, model: Any, ours: Generation, against: str, write: Callable[..., Generation]) -> None:
    """Logits and speed of the stock implementation, which decodes in transformers' own loop."""
    from moefuse import hf

    logits = _logits_of("moefuse", model, ours.tokens)
    hf.uncapture(model)
    hf.unpatch(model)
    hf.dequantize(model)
    _use(model, against)
    stock_logits = _logits_of(against, model, ours.tokens)
    stock = write(name=against, quiet=True, to_the_end=True, warm=True)
    _print_rates(console, against, stock)
    console.print(f"{against} decodes uncaptured, in transformers' own loop", highlight=False)
    pairs = list(zip(logits, stock_logits, strict=True))
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    size = max(float(b.abs().max()) for _, b in pairs)
    decode = f", decode {ours.decode_rate / stock.decode_rate:.2f}x" if stock.decode_rate else ""
    console.print(f"largest logit difference {largest:.2e}, of logits up to {size:.1f}", highlight=False)
    prefill = f"prefill {ours.prefill_rate / stock.prefill_rate:.2f}x"
    console.print(f"speed against {against}: {prefill}{decode}", highlight=False)


def _logits_of(name: str, model: Any, sequences: list[Tensor]) -> list[Tensor]:
    from moefuse.hf.text import NotFinite, refuse_not_finite

    found: list[Tensor] = []
    for tokens in sequences:
        with torch.no_grad():
            found.append(model(input_ids=tokens[None]).logits.float())
        try:
            refuse_not_finite(model, tokens[None], found[-1])
        except NotFinite as error:
            _give_up(name, error)
    return found


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


def _refuse_placement(
    experts: str | None, gpu_memory: str | None, target: torch.device, parallel: str | None, compare: bool
) -> None:
    from moefuse.nn.placement import WORDS
    from moefuse.nn.sizes import bytes_of

    hint = "--gpu-memory" if experts is None else "--experts-on"
    if experts is not None:
        options.known("--experts-on", experts, WORDS)
    if target.type != "cuda":
        options.stop(hint, f"experts are placed between RAM and a GPU, and the device is {target.type}")
    if parallel is not None or compare:
        options.stop(hint, f"it does not go with {'--parallel' if compare is False else '--compare'}: leave one out")
    if gpu_memory is not None:
        try:
            bytes_of(gpu_memory)
        except ValueError as error:
            options.stop("--gpu-memory", str(error))


def _box() -> str:
    if not _BOX.is_file():
        options.stop("MODEL", "this install came without the model in the box: name a directory or a GGUF file")
    return str(_BOX)


def _load(path: str, device: torch.device, parallel: str | None, **how: Any) -> tuple[Any, Any]:
    """A model and its tokenizer; what `moefuse.hf.load` is told of it."""
    if not (path.endswith(".gguf") and device.type == "cpu" and parallel is None):
        return _loaded(path, device=device, parallel=parallel, **how)
    with many_imports(), without_compiler():  # a model's own modules are imported when it is loaded
        return _loaded(path, device=device, parallel=parallel, **how)


def _loaded(path: str, **how: Any) -> tuple[Any, Any]:
    try:
        with many_imports():
            from moefuse import hf
            from moefuse.hf import text  # noqa: F401  # where the collector waits
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
            model, tokenizer = load(path, **how)
        except ValueError as error:
            options.stop("--gpu-memory" if str(error).startswith("gpu_memory") else "MODEL", str(error))
    answer = hf.supports(model)
    if not answer:
        options.stop("MODEL", f"{answer.reason}; run it with transformers alone")
    return model, tokenizer


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _tokens(tokenizer: Any, prompt: str | list[dict[str, str]]) -> Tensor:
    """The tokens ``[T]`` of a text, or of the turns of a conversation in the model's template."""
    if isinstance(prompt, str):
        tokens: Tensor = tokenizer(prompt, return_tensors="pt").input_ids[0]
    elif tokenizer.chat_template is None:
        options.stop("--chat", "the model's tokenizer has no chat template; leave --chat out")
    else:
        filled = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = filled["input_ids"][0]
    if len(tokens) == 0:
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
