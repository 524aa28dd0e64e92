"""Decode speed of a scaled-down Qwen3-MoE: transformers' own experts against moefuse, end to end.

Real widths, fewer layers, random weights: `python examples/decode_speed.py`. The implementations take turns, so that a
machine that slows down slows all of them; a result whose logits are wrong gets no figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from moefuse import config

STOCK = ("grouped_mm", "batched_mm", "eager")


def build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        hidden_size=args.hidden, num_hidden_layers=args.layers, num_experts=args.experts, head_dim=128,
        moe_intermediate_size=args.intermediate, num_experts_per_tok=args.top_k, num_attention_heads=args.heads,
        num_key_value_heads=max(args.heads // 8, 1), vocab_size=args.vocab, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(settings)
    model = model.to(dtype).to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(settings).to(device)
    # Drawing billions of normal numbers takes longer than the measurement: one draw of a prime length is repeated.
    noise = torch.randn(1_000_003).to(device, dtype)
    for name, value in model.named_parameters():
        if value.dim() == 1:
            value.data.fill_(1)
            continue
        flat = value.data.view(-1)
        for start in range(0, flat.numel(), noise.numel()):
            flat[start : start + noise.numel()] = noise[: flat.numel() - start]
        value.data.mul_(1.0 if "embed" in name else value.shape[-1] ** -0.5)
    return model.eval()


def stepper(model: torch.nn.Module, prompt: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Prefill, and a call that decodes one more token of each prompt, the same ones for every implementation."""
    cache = model(input_ids=prompt, use_cache=True).past_key_values
    tokens = iter(prompt.repeat(1, 1 + 1000 // prompt.shape[1]).T)

    def step() -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=next(tokens).view(-1, 1), past_key_values=cache, use_cache=True).logits
        return logits

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "layers": 4, "hidden": 2048, "experts": 128, "intermediate": 768, "top-k": 8, "heads": 32, "vocab": 4096,
        "batch": 1, "prompt": 32, "steps": 16, "rounds": 5, "threads": 0,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", default=",".join(STOCK), help="stock implementations, with commas between")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cpu":
        config.cap_onednn()
    if args.threads:
        torch.set_num_threads(args.threads)
    import moefuse.hf

    model = build(args, device, dtype)
    prompt = torch.randint(0, args.vocab, (args.batch, args.prompt), device=device)
    contestants = [*args.against.split(","), "moefuse experts", "moefuse blocks"]
    times: dict[str, list[float]] = {name: [] for name in contestants}
    logits: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for _ in range(args.rounds):
            for name in contestants:
                model.set_experts_implementation("moefuse" if name.startswith("moefuse") else name)
                if name == "moefuse blocks":
                    moefuse.hf.patch(model)
                step = stepper(model, prompt)
                logits.setdefault(name, step().float())  # the first step also warms up
                for _ in range(args.steps):
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    step()
                    if device.type == "cuda":
                        torch.cuda.synchronize()
                    times[name].append(time.perf_counter() - start)
                moefuse.hf.unpatch(model)
    report(args, contestants, times, logits)


def report(
    args: argparse.Namespace, contestants: list[str], times: dict[str, list[float]], logits: dict[str, torch.Tensor]
) -> None:
    best = min(statistics.median(times[name]) for name in contestants if not name.startswith("moefuse"))
    right = logits[contestants[0]]
    print(
        f"{args.layers} layers of H={args.hidden}, E={args.experts}, I={args.intermediate}, top-{args.top_k}, "
        f"batch {args.batch}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print("\n| experts | decode tokens/s | against the best stock one | logits differ by |\n|---|---|---|---|")
    for name in contestants:
        error = float((logits[name] - right).square().mean().sqrt() / right.square().mean().sqrt())
        middle = statistics.median(times[name])
        # In bfloat16 each path rounds in its own places, and a router between two experts may take either.
        wrong = error > (1e-4 if args.dtype == "float32" else 0.25)
        figures = "wrong | wrong" if wrong else f"{args.batch / middle:.1f} | {best / middle:.2f}x"
        print(f"| {name} | {figures} | {error:.1e} |")


if __name__ == "__main__":
    main()
