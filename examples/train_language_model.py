"""Train a small mixture-of-experts language model from scratch, on bytes, and draw its loss.

    python examples/train_language_model.py                     # two minutes on two cores; the same line on a GPU
    python examples/train_language_model.py --text book.txt --steps 2000 --plot loss.png

Without ``--text`` it reads the source of Python's standard library, which every machine has.
"""

from __future__ import annotations

import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from moefuse import Routing, config
from moefuse.nn import MoE, RouterTraining, RoutingStats, auxiliary_loss


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, L, H = x.shape
        q, k, v = self.qkv(self.norm(x)).view(B, L, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        return x + self.out(out.transpose(1, 2).reshape(B, L, H))


def rotate(x: Tensor) -> Tensor:
    """Rotary positions, halves."""
    half = x.shape[-1] // 2
    speed = 10000 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out; every feed-forward block is a mixture of experts."""

    def __init__(self, hidden: int, layers: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.attention = nn.ModuleList(Attention(hidden, hidden // 32) for _ in range(layers))
        self.experts = nn.ModuleList(
            MoE(
                hidden,
                hidden,
                num_experts,
                Routing(top_k=top_k),
                norm=True,
                router_training=RouterTraining(balance_loss=0.01, z_loss=0.001),
            )
            for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, ids: Tensor, backend: str | None = None) -> Tensor:
        x = self.embedding(ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = attention(x)
            x = experts(x, residual=x, backend=backend)
        return F.linear(self.norm(x), self.embedding.weight)


def read_text(path: Path | None) -> Tensor:
    if path is not None:
        text = path.read_bytes()
    else:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(source.read_bytes() for source in sorted(library.glob("*.py")))
    if len(text) < 100_000:
        raise typer.BadParameter(f"{path} has {len(text):,} bytes; training needs at least 100,000")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batch(text: Tensor, size: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows, and the same shifted by one."""
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=rng)
    window = text[starts + torch.arange(length + 1)]
    return window[:, :-1], window[:, 1:]


@torch.no_grad()
def held_out_loss(model: LanguageModel, text: Tensor, length: int, device: str, backend: str | None) -> float:
    """Mean over windows side by side from the start of ``text``."""
    windows = text[: 32 * length + 1]
    inputs, targets = windows[:-1].view(-1, length).to(device), windows[1:].view(-1, length).to(device)
    model.eval()
    loss = F.cross_entropy(model(inputs, backend).flatten(0, 1).float(), targets.flatten())
    model.train()
    return float(loss)


@dataclass(frozen=True)
class Options:
    steps: int
    batch_size: int
    length: int
    rate: float
    seed: int
    device: str


@dataclass
class Curve:
    """One training run."""

    losses: list[float]
    held_out: list[tuple[int, float]]
    stats: dict[str, RoutingStats]
    seconds: float


def fit(model: LanguageModel, corpus: Tensor, options: Options, backend: str | None) -> Curve:
    """Train ``model`` in place."""
    cut, device, steps = len(corpus) * 9 // 10, options.device, options.steps
    stats = RoutingStats.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warmup = min(50, steps // 4 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 * (1 + math.cos(math.pi * i / steps)))
    )
    rng = torch.Generator().manual_seed(options.seed)

    def held_out(step: int) -> tuple[int, float]:
        return step, held_out_loss(model, corpus[cut:], options.length, device, backend)

    curve = Curve([], [held_out(0)], stats, 0.0)
    began = time.perf_counter()
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]:.3f} nats"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=steps, loss=curve.held_out[0][1])
        for step in range(1, steps + 1):
            inputs, targets = (t.to(device) for t in batch(corpus[:cut], options.batch_size, options.length, rng))
            loss = F.cross_entropy(model(inputs, backend).flatten(0, 1).float(), targets.flatten())
            (loss + auxiliary_loss(model)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            curve.losses.append(loss.item())
            if step % 50 == 0 or step == steps:
                curve.held_out.append(held_out(step))
            progress.update(task, advance=1, loss=curve.losses[-1])
    curve.seconds = time.perf_counter() - began
    return curve


def draw(curves: dict[str, Curve], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    styles = (("#9db4c0", "#1f4e5f", "-"), ("#e3b7a0", "#b3541e", "--"))
    for (name, curve), (pale, strong, line) in zip(curves.items(), styles, strict=False):
        axes.plot(curve.losses, color=pale, linewidth=0.8, linestyle=line, label=f"batch, {name}")
        held_out = zip(*curve.held_out, strict=True)
        axes.plot(*held_out, color=strong, linestyle=line, marker="o", markersize=3, label=f"held out, {name}")
    axes.set(xlabel="step", ylabel="nats per byte", title="Language model with experts, trained from scratch")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def train(
    text: Annotated[Path | None, typer.Option(help="a text file; the standard library's source without it")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    length: Annotated[int, typer.Option(min=2, help="bytes per window")] = 128,
    hidden: Annotated[int, typer.Option(min=32)] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 3,
    experts: Annotated[int, typer.Option(min=1)] = 16,
    top_k: Annotated[int, typer.Option(min=1)] = 2,
    rate: Annotated[float, typer.Option(help="peak learning rate")] = 2e-3,
    seed: int = 0,
    device: Annotated[str | None, typer.Option(help="cuda where there is one, else cpu")] = None,
    backend: Annotated[str | None, typer.Option(help="cpu, triton, reference, ...")] = None,
    against: Annotated[str | None, typer.Option(help="train again with this backend, and draw both")] = None,
    plot: Annotated[Path, typer.Option(help="where the picture goes")] = Path("loss.png"),
) -> None:
    """Train, print held-out loss and expert load, and draw the loss."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = Options(steps, batch_size, length, rate, seed, device)
    corpus = read_text(text)
    curves = {}
    for name in (backend, against) if against else (backend,):
        torch.manual_seed(seed)
        model = LanguageModel(hidden, layers, experts, top_k).to(device)
        total = sum(p.numel() for p in model.parameters())
        print(
            f"{total / 1e6:.1f} million parameters, {experts} experts, top {top_k}, on {device}; {len(corpus):,} bytes"
        )
        curve = curves[name or "moefuse"] = fit(model, corpus, options, name)
        first, last = curve.held_out[0][1], curve.held_out[-1][1]
        print(f"held out: {first:.3f} -> {last:.3f} nats per byte in {curve.seconds:.0f} s, ", end="")
        print(f"{steps * batch_size * length / curve.seconds:,.0f} bytes per second")
        for block, recorded in curve.stats.items():
            print(f"{block}: imbalance {recorded.imbalance:.2f}, entropy {recorded.entropy:.2f}")
    draw(curves, plot)
    print(f"loss picture: {plot}")


if __name__ == "__main__":
    config.cap_onednn()
    typer.run(train)
