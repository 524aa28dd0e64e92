"""Decode speed of Qwen3-MoE's widths, end to end: transformers' own ways against moefuse's.

Real widths, random weights: `python examples/decode_speed.py` decodes 4 layers on the CPU; on an H200
`--device cuda --layers 48 --vocab 151936` is Qwen3-30B-A3B whole. The contestants take turns, so that a machine that
slows down slows all of them; a result whose logits are wrong gets no figure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moefuse import config

STOCK = ("grouped_mm", "batched_mm", "eager")
OURS = ("moefuse experts", "moefuse layers", "moefuse captured")
Step = Callable[[Tensor], Tensor]


def build(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> nn.Module:
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


class Contest:
    """The model, and what of each contestant outlives a turn: a compiled forward, a captured step."""

    def __init__(self, args: argparse.Namespace, model: nn.Module) -> None:
        self.args, self.model = args, model
        self.kept: dict[str, object] = {}
        self.seconds: dict[str, float] = {}

    def begin(self, name: str, prompt: Tensor) -> Step:
        """The prompt's pass, and a function that decodes one more token of each sequence."""
        import moefuse.hf

        experts = "moefuse" if name in OURS else name.removesuffix(" compiled")
        self.model.set_experts_implementation(experts)
        if name in OURS[1:]:
            moefuse.hf.patch(self.model)
        if name == "moefuse captured":
            return self._captured(prompt)
        return self._compiled(name, prompt) if name.endswith(" compiled") else self._eager(prompt)

    def end(self) -> None:
        import moefuse.hf

        moefuse.hf.unpatch(self.model)

    def _eager(self, prompt: Tensor) -> Step:
        cache = self.model(input_ids=prompt, use_cache=True).past_key_values
        return lambda tokens: self.model(input_ids=tokens[:, None], past_key_values=cache, use_cache=True).logits

    def _compiled(self, name: str, prompt: Tensor) -> Step:
        from transformers import StaticCache

        cache = StaticCache(config=self.model.config, max_cache_len=self._length())
        self.model(input_ids=prompt, past_key_values=cache, use_cache=True)
        run = self.kept.setdefault(name, torch.compile(self.model.forward, mode="reduce-overhead"))

        def step(tokens: Tensor) -> Tensor:
            found = run(input_ids=tokens[:, None].clone(), past_key_values=cache, use_cache=True)  # type: ignore[operator]
            return found.logits.clone()

        return step

    def _captured(self, prompt: Tensor) -> Step:
        from moefuse.hf.capture import Step as Captured

        found = self.kept.get("captured")
        if not isinstance(found, Captured):
            started = time.perf_counter()
            found = self.kept["captured"] = Captured(self.model, len(prompt), self._length())
            self.seconds["moefuse captured"] = time.perf_counter() - started
        found.prefill(prompt, None)
        return found

    def _length(self) -> int:
        return int(self.args.prompt + self.args.steps + 8)


def waited(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "--layers": 4, "--hidden": 2048, "--experts": 128, "--intermediate": 768, "--top-k": 8, "--heads": 32,
        "--vocab": 4096, "--batch": 1, "--prompt": 32, "--steps": 16, "--rounds": 5, "--threads": 0, "--prefill": 0,
    }.items():  # fmt: skip
        parser.add_argument(name, type=int, default=default, help=f"default {default}")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    against = "stock implementations, with commas between; with ' compiled' behind a name, by torch.compile"
    parser.add_argument("--against", default=",".join(STOCK), help=against)
    parser.add_argument("--profile", action="store_true", help="kernels of one captured step, by time (cuda)")
    parser.add_argument("--blocks", action="store_true", help="then the model in the formats of a Q4_K_M file")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    if device.type == "cpu":
        config.cap_onednn()
    if args.threads:
        torch.set_num_threads(args.threads)
    model = build(args, device, dtype)
    contest = Contest(args, model)
    prompt = torch.randint(0, args.vocab, (args.batch, args.prompt), device=device)
    # Every sequence its own tokens, or all of a batch would go to the same experts.
    tokens = torch.randint(0, args.vocab, (args.steps + 1, args.batch), device=device)
    contestants = [*args.against.split(","), *OURS]
    times: dict[str, list[float]] = {name: [] for name in contestants}
    logits: dict[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(args.rounds):
            for name in contestants:
                step = contest.begin(name, prompt)
                started = waited(device)
                first = step(tokens[0]).float()  # the first step also warms up
                contest.seconds.setdefault(name, waited(device) - started)
                logits.setdefault(name, first.reshape(args.batch, -1).clone())
                for row in tokens[1:]:
                    started = waited(device)
                    step(row)
                    times[name].append(waited(device) - started)
                contest.end()
        report(args, contestants, times, logits, contest.seconds)
        if args.prefill:
            prefill(args, contest)
        if args.profile and device.type == "cuda":
            profile(args, contest)
        if args.blocks:
            in_blocks(args, contest, prompt, tokens)


def report(
    args: argparse.Namespace,
    contestants: list[str],
    times: dict[str, list[float]],
    logits: dict[str, Tensor],
    seconds: dict[str, float],
) -> None:
    best = min(statistics.median(times[name]) for name in contestants if name not in OURS)
    right = logits[contestants[0]]
    print(
        f"{args.layers} layers of H={args.hidden}, E={args.experts}, I={args.intermediate}, top-{args.top_k}, "
        f"batch {args.batch}, {args.dtype}, {args.device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    print("\n| | decode tokens/s | against the best stock one | first step, s | logits differ by |")
    print("|---|---|---|---|---|")
    for name in contestants:
        error = float((logits[name] - right).square().mean().sqrt() / right.square().mean().sqrt())
        middle = statistics.median(times[name])
        # In bfloat16 each path rounds in its own places, and a router between two experts may take either.
        wrong = error > (1e-4 if args.dtype == "float32" else 0.25)
        figures = "wrong | wrong" if wrong else f"{args.batch / middle:.1f} | {best / middle:.2f}x"
        print(f"| {name} | {figures} | {seconds[name]:.1f} | {error:.1e} |")


def prefill(args: argparse.Namespace, contest: Contest) -> None:
    """A long prompt, without a cache: the time of one pass."""
    prompt = torch.randint(0, args.vocab, (1, args.prefill), device=args.device)
    device, found = torch.device(args.device), dict[str, float]()
    for name in (args.against.split(",")[0], "moefuse layers"):
        contest.begin(name, prompt[:, :8])
        passes = []
        for _ in range(7):
            started = waited(device)
            contest.model(input_ids=prompt, use_cache=False, logits_to_keep=1)
            passes.append(waited(device) - started)
        found[name] = statistics.median(passes)
        contest.end()
    stock, ours = found.values()
    rates = ", ".join(f"{name} {args.prefill / taken:.0f} tokens/s" for name, taken in found.items())
    print(f"\nprefill of {args.prefill} tokens: {rates}: {stock / ours:.2f}x")


def in_blocks(args: argparse.Namespace, contest: Contest, prompt: Tensor, tokens: Tensor) -> None:
    """The captured step once more, with the model in the formats of a Q4_K_M file."""
    import moefuse.hf
    from moefuse.nn import QuantEmbedding, QuantLinear

    model, device, dtype = contest.model, prompt.device, getattr(torch, args.dtype)
    contest.kept.clear()
    started = waited(device)
    moefuse.hf.quantize_(model, "Q4_K", {r"\d*[02468]\.mlp\.experts\.down": "Q6_K"})
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            even = path.endswith("v_proj") and int(path.split(".")[2]) % 2 == 0
            format = "Q6_K" if even or path == "lm_head" else "Q4_K"
            format = format if layer.in_features % 256 == 0 else "Q8_0"
            model.set_submodule(path, QuantLinear(moefuse.quantize(layer.weight.data, format), dtype=dtype))
    words = model.get_input_embeddings().weight.data
    format = "Q4_K" if words.shape[1] % 256 == 0 else "Q8_0"
    model.set_input_embeddings(QuantEmbedding(moefuse.quantize(words, format), dtype=dtype))
    print(f"\nin blocks as in a Q4_K_M file, made in {waited(device) - started:.0f} s")
    times = []
    for _ in range(args.rounds):
        step = contest.begin("moefuse captured", prompt)
        step(tokens[0])
        for row in tokens[1:]:
            started = waited(device)
            step(row)
            times.append(waited(device) - started)
        contest.end()
    print(f"moefuse captured: {args.batch / statistics.median(times):.1f} decode tokens/s")


def profile(args: argparse.Namespace, contest: Contest) -> None:
    """Kernels of one captured step. Their times hold the wait for what comes before, as launches overlap."""
    step: object = contest.kept["captured"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        step.replay()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda row: -row.device_time_total)
    launches = sum(row.count for row in rows)
    inside = sum(row.count for row in rows if row.count >= args.layers)
    print(f"\n{launches} launches in a step, {inside / args.layers:.1f} in a layer\n")
    print("| kernel | launches | us |\n|---|---|---|")
    for row in rows[:12]:
        print(f"| {row.key[:60]} | {row.count} | {row.device_time_total:.0f} |")


if __name__ == "__main__":
    main()
