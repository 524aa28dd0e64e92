"""Make the model in the box again: train it, write it as GGUF, measure it.

The text is public domain and comes in Debian's packages bible-kjv (the King James Version of 1611) and
r-cran-janeaustenr (Jane Austen's six novels, 1811 to 1818):

    bible -f 'Gen1:1-Rev22:21' > kjv.txt
    Rscript -e 'writeLines(janeaustenr::austen_books()$text)' > austen.txt
    python examples/boxed_model.py train kjv.txt austen.txt --out box       # two minutes on an H200
    python examples/boxed_model.py export box box/box.gguf
    python examples/boxed_model.py draw box loss.png
    python examples/boxed_model.py perplexity box/box.gguf --text box/held_out.txt
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import moefuse.hf
from moefuse import config, quantize
from moefuse.nn import load_balancing_loss, router_z_loss
from moefuse.quant import gguf

END_OF_TEXT = "<|endoftext|>"
# How Qwen2 cuts text into words: the one that GGUF's "qwen2" names.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": 0,
}
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Train, export and measure the model in the box.")


def paragraphs(text: str) -> list[str]:
    """One line each, without verse numbers, headings and marks of emphasis."""
    text = re.sub(r"(?m)^\w+:\d+ (.+)$", r"\n\1\n", text)
    joined = (" ".join(block.split()).replace("_", "") for block in re.split(r"\n\s*\n", text))
    return [line for line in joined if re.search(r"[a-z]", line) and line[-1] in ".,;:!?\"')-"]


def split(text: str, piece: int = 10_000) -> dict[str, str]:
    """Pieces of ten thousand characters: of forty one is held out, one validates, the rest train."""
    pieces: list[list[str]] = [[]]
    for line in paragraphs(text):
        if sum(map(len, pieces[-1])) >= piece:
            pieces.append([])
        pieces[-1].append(line)
    if len(pieces) < 40:
        raise typer.BadParameter(
            f"a text must have paragraphs of at least {40 * piece:,} characters in all, got {len(text):,}"
        )
    names = ("held_out", "validation")
    parts: dict[str, list[str]] = {"training": [], "validation": [], "held_out": []}
    for i, lines in enumerate(pieces):
        parts[names[i % 40 // 20] if i % 20 == 19 else "training"] += lines
    return {name: "\n".join(lines) + "\n" for name, lines in parts.items()}


def train_tokenizer(text: str, size: int) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, bos_token=END_OF_TEXT)


def encode(tokenizer: Any, text: str) -> Tensor:
    return torch.tensor(tokenizer(text, return_attention_mask=False, verbose=False).input_ids)


def windows(tokens: Tensor, length: int) -> Tensor:
    """Side by side, ``[N, length + 1]``: each ends with the token that the next begins with."""
    count = (len(tokens) - 1) // length
    return tokens[torch.arange(count)[:, None] * length + torch.arange(length + 1)]


@torch.no_grad()
def mean_loss(model: nn.Module, cut: Tensor, rows: int = 32) -> float:
    """Nats per token over all windows."""
    total = torch.zeros((), dtype=torch.float64, device=cut.device)
    for part in cut.split(rows):
        logits = model(input_ids=part[:, :-1], use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
    return float(total) / cut[:, 1:].numel()


@dataclass
class RouterLoss:
    """Hooks on the routers: what keeps experts evenly loaded and logits small."""

    balance: float
    z: float
    losses: list[Tensor] = field(default_factory=list)

    def attach(self, model: Any) -> None:
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(self._record)

    def _record(self, router: Any, args: tuple[Tensor], results: tuple[Tensor, ...]) -> None:
        if router.training:
            logits = F.linear(args[0].reshape(-1, router.weight.shape[1]), router.weight)
            loss = self.balance * load_balancing_loss(logits, results[-1])
            self.losses.append(loss + self.z * router_z_loss(logits))

    def take(self) -> Tensor:
        total = torch.stack(self.losses).sum()
        self.losses.clear()
        return total


def drop_out(model: Any, rate: float) -> None:
    """Dropout on whatever enters the residual stream; the architecture has none of its own there."""

    def hook(module: nn.Module, args: Any, out: Tensor) -> Tensor:  # noqa: ARG001  # the form of a hook
        return F.dropout(out, rate, module.training)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(hook)
        layer.mlp.experts.register_forward_hook(hook)


@dataclass(frozen=True)
class Recipe:
    steps: int
    batch_size: int
    length: int
    rate: float
    decay: float
    dropout: float
    seed: int
    minutes: float
    checks: int


@dataclass
class Curve:
    losses: list[float]
    validation: list[tuple[int, float]]
    seconds: float = 0.0


class Masters:
    """float32 copies of the weights, which the optimiser moves; the model computes with them rounded."""

    def __init__(self, model: nn.Module, rate: float, decay: float) -> None:
        self.rate, self.weights = rate, list(model.parameters())
        self.masters = [weight.detach().float().clone().requires_grad_() for weight in self.weights]
        wide = [master for master in self.masters if master.dim() > 1]
        rest = [master for master in self.masters if master.dim() == 1]
        groups = [{"params": wide, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        on_gpu = self.masters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_gpu)

    def step(self, factor: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate * factor
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None
        nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.write(self.masters)

    @torch.no_grad()
    def write(self, values: list[Tensor]) -> None:
        torch._foreach_copy_(self.weights, values)

    def copy(self) -> list[Tensor]:
        return [master.detach().clone() for master in self.masters]


def fit(model: Any, tokens: Tensor, validation: Tensor, recipe: Recipe) -> Curve:
    """Train in place, and leave the weights that validated best."""
    device, steps, every = tokens.device, recipe.steps, max(recipe.steps // recipe.checks, 1)
    router = RouterLoss(balance=0.01, z=0.001)
    router.attach(model)
    drop_out(model, recipe.dropout)
    masters = Masters(model, recipe.rate, recipe.decay)
    rng = torch.Generator().manual_seed(recipe.seed)
    starts = torch.randint(len(tokens) - recipe.length - 1, (steps, recipe.batch_size, 1), generator=rng).to(device)
    span = torch.arange(recipe.length + 1, device=device)
    curve, recorded, best = Curve([], []), [], (math.inf, masters.copy())
    began = settled = time.perf_counter()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]:.3f} nats"))
    with Progress(*columns, TimeRemainingColumn(), refresh_per_second=2) as progress:
        task = progress.add_task("", total=steps, loss=math.nan)
        for step in range(1, steps + 1):
            if step == 20:  # the first steps compile kernels
                settled = time.perf_counter()
            spent = (time.perf_counter() - settled) / (60 * recipe.minutes) if step > 20 else 0.0
            done = max(step / steps, spent)
            window = tokens[starts[step - 1] + span]
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
            (loss + router.take()).backward()
            masters.step(min(step / 100, 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))))
            recorded.append(loss.detach())
            if step % every == 0 or step == steps or done >= 1:
                model.eval()
                curve.validation.append((step, mean_loss(model, validation)))
                model.train()
                curve.losses += torch.stack(recorded).tolist()
                recorded.clear()
                if curve.validation[-1][1] < best[0]:
                    best = (curve.validation[-1][1], masters.copy())
                progress.update(task, completed=step, loss=curve.validation[-1][1])
            if done >= 1:
                break
    curve.seconds = time.perf_counter() - began
    masters.write(best[1])
    return curve


@app.command()
def draw(
    folder: Annotated[Path, typer.Argument(help="what train wrote", exists=True, file_okay=False)],
    picture: Annotated[Path, typer.Argument(help="the .png to write")],
) -> None:
    """Draw the losses of a training run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    run = json.loads((folder / "losses.json").read_text())
    losses, validation, held_out = run["losses"], run["validation"], run["held_out"]
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9db4c0", linewidth=0.8, label="batch, with dropout")
    axes.plot(*zip(*validation, strict=True), color="#1f4e5f", marker="o", markersize=3, label="validation")
    axes.axhline(held_out, color="#b3541e", linestyle="--", linewidth=1, label=f"held out, in the end: {held_out:.3f}")
    axes.set(xlabel="step", ylabel="nats per token", title="The model in the box")
    axes.legend()
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


@app.command()
def train(
    texts: Annotated[list[Path], typer.Argument(help="text files", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Option(help="folder for model, tokenizer, held-out text and losses")],
    steps: Annotated[int, typer.Option(min=1)] = 2200,
    batch_size: Annotated[int, typer.Option(min=1)] = 32,
    length: Annotated[int, typer.Option(min=2, help="tokens per window")] = 512,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 1e-3,
    decay: Annotated[float, typer.Option(help="weight decay")] = 0.1,
    dropout: Annotated[float, typer.Option(min=0, max=1)] = 0.2,
    minutes: Annotated[float, typer.Option(help="end cleanly after so long, if the steps are not done")] = 4.0,
    checks: Annotated[int, typer.Option(min=1, help="how often to validate")] = 40,
    seed: int = 0,
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu")] = None,
    override: Annotated[list[str] | None, typer.Option(help="NAME=NUMBER of the model's configuration")] = None,
) -> None:
    """Train from scratch with moefuse's experts, and save what validates best."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    out.mkdir(parents=True, exist_ok=True)
    sizes = MODEL | {name: int(value) for name, value in (pair.split("=") for pair in override or ())}
    parts = [split(path.read_text()) for path in texts]
    joined = {name: END_OF_TEXT.join(part[name] for part in parts) for name in parts[0]}
    tokenizer = train_tokenizer("".join(part["training"] for part in parts), sizes["vocab_size"])
    tokens = {name: encode(tokenizer, text).to(device) for name, text in joined.items()}
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), experts_implementation=moefuse.hf.NAME)
    model = model.to(torch.bfloat16 if device.startswith("cuda") else torch.float32).train()
    total = sum(weight.numel() for weight in model.parameters())
    print(f"{total / 1e6:.1f} million weights on {device}, ", ", ".join(f"{len(t):,} {n}" for n, t in tokens.items()))
    recipe = Recipe(steps, batch_size, length, rate, decay, dropout, seed, minutes, checks)
    curve = fit(model, tokens["training"], windows(tokens["validation"], length), recipe)
    model = model.to(torch.bfloat16).eval()
    held_out = mean_loss(model, windows(tokens["held_out"], length))
    best = min(curve.validation, key=lambda at: at[1])
    print(f"{len(curve.losses)} steps in {curve.seconds:.0f} s; ", end="")
    print(f"validation {best[1]:.4f} at step {best[0]}, held out {held_out:.4f} nats per token")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "held_out.txt").write_text(joined["held_out"])
    found = {"recipe": asdict(recipe), "best": best, "held_out": held_out, **asdict(curve)}
    (out / "losses.json").write_text(json.dumps(found))


#: end of a tensor's name in GGUF -> in transformers
DENSE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}


def gguf_tensors(model: Any, dense: str, gate_up: str, down: str) -> Iterator[tuple[str, Any]]:
    """The model's tensors by GGUF's names: vectors and routers in float32, the rest in the types named."""

    def typed(weight: Tensor, name: str) -> Any:
        return weight.to(torch.bfloat16) if name == "BF16" else quantize(weight.float(), name)

    base = model.model
    yield "token_embd.weight", typed(base.embed_tokens.weight, dense)
    yield "output_norm.weight", base.norm.weight.float()
    for i, layer in enumerate(base.layers):
        for name, path in DENSE.items():
            weight = layer.get_parameter(f"{path}.weight")
            keep = weight.dim() == 1 or name == "ffn_gate_inp"
            yield f"blk.{i}.{name}.weight", weight.float() if keep else typed(weight, dense)
        gates, ups = layer.mlp.experts.gate_up_proj.chunk(2, 1)
        yield f"blk.{i}.ffn_gate_exps.weight", typed(gates, gate_up)
        yield f"blk.{i}.ffn_up_exps.weight", typed(ups, gate_up)
        yield f"blk.{i}.ffn_down_exps.weight", typed(layer.mlp.experts.down_proj, down)


def gguf_metadata(model: Any, tokenizer: Any) -> dict[str, Any]:
    """llama.cpp's keys for a Qwen3-MoE model and a byte-level tokenizer."""
    sizes, arch = model.config, "qwen3moe"
    pieces = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(pieces["vocab"], key=pieces["vocab"].get)
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in pieces["merges"]]
    return {
        "general.architecture": arch,
        "general.name": "moefuse box",
        "general.license": "Apache-2.0",
        "general.description": "Trained by moefuse on the King James Version and Jane Austen's novels, public domain",
        f"{arch}.block_count": sizes.num_hidden_layers,
        f"{arch}.context_length": sizes.max_position_embeddings,
        f"{arch}.embedding_length": sizes.hidden_size,
        f"{arch}.feed_forward_length": sizes.intermediate_size,
        f"{arch}.expert_feed_forward_length": sizes.moe_intermediate_size,
        f"{arch}.expert_count": sizes.num_experts,
        f"{arch}.expert_used_count": sizes.num_experts_per_tok,
        f"{arch}.attention.head_count": sizes.num_attention_heads,
        f"{arch}.attention.head_count_kv": sizes.num_key_value_heads,
        f"{arch}.attention.key_length": sizes.head_dim,
        f"{arch}.attention.value_length": sizes.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": sizes.rms_norm_eps,
        f"{arch}.rope.freq_base": sizes.rope_parameters["rope_theta"],
        f"{arch}.vocab_size": sizes.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": vocabulary,
        "tokenizer.ggml.token_type": [3 if token == END_OF_TEXT else 1 for token in vocabulary],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": sizes.bos_token_id,
        "tokenizer.ggml.eos_token_id": sizes.eos_token_id,
        "tokenizer.ggml.add_bos_token": False,
    }


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(help="what train wrote", exists=True, file_okay=False)],
    file: Annotated[Path, typer.Argument(help="the GGUF file to write")],
    gate_up: Annotated[str, typer.Option(help="type of the experts' gate and up: BF16, Q8_0, Q6_K, Q4_K, ..")] = "Q4_K",
    down: Annotated[str, typer.Option(help="type of the experts' down")] = "Q6_K",
    dense: Annotated[str, typer.Option(help="type of embedding and attention")] = "Q8_0",
) -> None:
    """Write the trained model as one GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        tensors = dict(gguf_tensors(model, dense, gate_up, down))
    gguf.write(file, gguf_metadata(model, AutoTokenizer.from_pretrained(folder)), tensors)
    print(f"{file}: {file.stat().st_size / 1e6:.2f} MB")


@app.command()
def perplexity(
    files: Annotated[list[Path], typer.Argument(help="GGUF files that export wrote", exists=True, dir_okay=False)],
    text: Annotated[Path, typer.Option(help="the text", exists=True, dir_okay=False)],
    rounded: Annotated[bool, typer.Option(help="let the backend round activations to 8 bits, its default")] = False,
    length: Annotated[int, typer.Option(min=2, help="tokens per window")] = 512,
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu")] = None,
) -> None:
    """Perplexity per token in float32, experts in the file's blocks; MOEFUSE_BACKEND chooses the backend."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    for file in files:
        model, tokenizer = moefuse.hf.from_gguf(file, dtype=torch.float32, device=device, exact=not rounded)
        moefuse.hf.patch(model)
        cut = windows(encode(tokenizer, text.read_text()), length).to(device)
        how = f"{device}, backend {config.backend() or 'default'}{', activations rounded' if rounded else ''}"
        print(f"{file.stem} on {how}: {math.exp(mean_loss(model, cut)):.4f} over {cut[:, 1:].numel():,} tokens")


if __name__ == "__main__":
    config.cap_onednn()
    app()
