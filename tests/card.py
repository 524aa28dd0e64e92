"""Everything that only a card can show, in one run: PYTHONPATH=src python tests/card.py [--only SECTIONS] [--out DIR]

Needs an NVIDIA GPU, torch and Triton; transformers for the models and compute-sanitizer for the sanitizers, each said
where missing. Each section is cut into jobs, each job is a process of its own, and a failure is one line of the report:
a job whose device is lost goes on behind the case that lost it. Results are kept in DIR, with a table for
docs/support.md. `--dry` shows on any machine that the script itself works: few cases, in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: section -> the seconds that each of its jobs may take
SECTIONS = {
    "cases": 300, "strange": 300, "compile": 300, "graphs": 150, "hopper": 150, "invariant": 420, "placed": 150,
    "sanitize": 420,
}  # fmt: skip
DTYPES = ("float32", "float16", "bfloat16")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
#: processes for the case table of one dtype (float32 with blocks compiles for minutes), and for one sanitizer
SLICES, SANITIZED_SLICES = {"float32": 10, "float16": 4, "bfloat16": 4}, 4
DEVICE_LOST = 3
SEED = 20
#: what the sanitizers' summaries say when nothing was found
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}

Check = tuple[str, Callable[[], str | None]]


@dataclass
class Job:
    """A process: ``section`` says what it checks, ``arguments`` which part of that."""

    section: str
    name: str
    arguments: dict[str, str]
    prefix: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# What a job checks: pairs of a name and a function that returns None, or what went wrong.


def table(arguments: dict[str, str]) -> Iterator[Check]:
    """A slice of the case table in one dtype, with gradients, plainly or in the strange forms of memory."""
    import torch

    from moefuse.testing import cases
    from moefuse.testing.strange import strange_cases

    dtype = getattr(torch, arguments["dtype"])
    part, parts = map(int, arguments["slice"].split("/"))
    chosen = [case for case in cases.CASES if dtype in cases.dtypes_of(case, "triton")]
    if "only" in arguments:
        chosen = [case for case in chosen if case.id in arguments["only"].split(",")]
    forms: list[tuple[Any, Any]] = [(case, None) for case in chosen]
    if arguments.get("strange"):
        forms = list(strange_cases(chosen))
    for case, form in forms[part::parts]:
        name = case.id if form is None else f"{case.id}, {form}"
        yield name, lambda case=case, form=form: told(cases.run(case, dtype, "triton", device(), SEED, strange=form))


def told(outcome: Any) -> str | None:
    return None if outcome.passed else str(outcome.describe())


def compiled(arguments: dict[str, str]) -> Iterator[Check]:
    """torch.compile in one mode of moe() and of a tiny model, forward and backward, fullgraph on and off."""
    mode = arguments["mode"]
    for whole in (True, False):
        for backward in (False, True):
            what = (
                f"{mode}, {'fullgraph' if whole else 'graph breaks allowed'}, {'backward' if backward else 'forward'}"
            )
            yield f"moe(): {what}", lambda whole=whole, backward=backward: compiled_block(mode, whole, backward)
            for way in ("patch", "experts_implementation"):
                yield (
                    f"model by {way}: {what}",
                    lambda way=way, whole=whole, backward=backward: compiled_model(way, mode, whole, backward),
                )


def make_block(T: int, dtype: Any, requires_grad: bool = False) -> tuple[Callable[..., Any], Any, list[Any]]:
    """A block whose router and tail both count, an input, and its weights."""
    import torch

    import moefuse

    torch.manual_seed(SEED)
    E, H, I = 8, 64, 32
    weights = [
        (torch.randn(shape) * 0.2).to(device(), dtype).requires_grad_(requires_grad)
        for shape in ((E, H), (E, 2 * I, H), (E, H, I), (H,))
    ]
    router, gate_up, down, norm = weights

    def block(x: Any) -> Any:
        return moefuse.moe(
            x, router, gate_up, down, moefuse.Routing(top_k=2), norm_weight=norm, residual=x, next_norm_weight=norm,
            backend="triton",
        )  # fmt: skip

    return block, torch.randn(T, H).to(device(), dtype).requires_grad_(requires_grad), weights


def close(name: str, have: Any, want: Any, bound: float) -> str | None:
    import torch

    have, want = have.detach().double(), want.detach().double()
    if not torch.isfinite(have).all():
        return f"{name} is not finite"
    worst = float((have - want).abs().max() / want.abs().max().clamp(min=1e-30))
    return None if worst <= bound else f"{name} is off by {worst:.1e} of its largest, bound {bound:.0e}"


def compile_as(run: Callable[..., Any], mode: str, whole: bool) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    torch.compiler.reset()
    if device() == "cpu":
        return torch.compile(run, fullgraph=whole, backend="eager")
    return torch.compile(run, fullgraph=whole, mode=None if mode == "default" else mode)


def compiled_block(mode: str, whole: bool, backward: bool) -> str | None:
    import torch

    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    block, x, weights = make_block(3, dtype, backward)
    inputs = [x, *weights]
    run = compile_as(lambda x: block(x), mode, whole)
    # The first call compiles, the second may warm graphs up and the third replays them.
    for turn in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(backward):
            found = run(x)
            pairs = [("out", found[0], block(x)[0]), ("normed", found[1], block(x)[1])]
        if backward:
            d = torch.ones_like(pairs[0][1])
            have = torch.autograd.grad(found, inputs, (d, d))
            goal = torch.autograd.grad(block(x), inputs, (d, d))
            names = ("x", "router", "gate_up", "down", "norm_weight")
            pairs += list(zip((f"gradient of {name}" for name in names), have, goal, strict=True))
        for name, got, want in pairs:
            wrong = close(f"{name}, call {turn + 1}", got, want, 2e-2)
            if wrong:
                return wrong
    return None


def make_model(way: str, dtype: Any) -> Any:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    import moefuse.hf

    torch.manual_seed(SEED)
    config = Qwen3MoeConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=8, num_experts_per_tok=2,
        max_position_embeddings=256,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(device(), dtype).eval()
    if way == "patch":
        moefuse.hf.patch(model)
    elif way == "experts_implementation":
        model.set_experts_implementation("moefuse")
    return model


def compiled_model(way: str, mode: str, whole: bool, backward: bool) -> str | None:
    import torch

    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    model, plain = make_model(way, dtype), make_model("stock", dtype)
    ids = torch.randint(0, 128, (2, 7), device=device())
    run = compile_as(lambda ids: model(ids, use_cache=False).logits, mode, whole)
    weight = next(p for name, p in model.named_parameters() if name.endswith("experts.down_proj"))
    goal_weight = next(p for name, p in plain.named_parameters() if name.endswith("experts.down_proj"))
    for turn in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(backward):
            have, want = run(ids), plain(ids, use_cache=False).logits
        pairs = [("logits", have, want)]
        if backward:
            scale = torch.randn(want.shape, generator=torch.Generator().manual_seed(SEED)).to(want)
            (got,) = torch.autograd.grad(have, weight, scale)
            (goal,) = torch.autograd.grad(want, goal_weight, scale)
            pairs.append(("gradient of an expert stack", got, goal))
        for name, got, goal in pairs:
            # A router's tie may fall otherwise in bfloat16; float32 leaves nothing to excuse.
            wrong = close(f"{name}, call {turn + 1}", got, goal, 6e-2 if dtype == torch.bfloat16 else 1e-4)
            if wrong:
                return wrong
    return None


def generated(_: dict[str, str]) -> Iterator[Check]:
    """generate with a static cache, which compiles the decode step, gives the tokens of the stock model."""

    def run(way: str) -> str | None:
        import torch

        model, plain = make_model(way, torch.float32), make_model("stock", torch.float32)
        ids = torch.randint(0, 128, (2, 5), device=device())
        options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        have = model.generate(ids, cache_implementation="static", **options)
        want = plain.generate(ids, **options)
        return None if torch.equal(have, want) else f"tokens differ: {have.tolist()} for {want.tolist()}"

    for way in ("patch", "experts_implementation"):
        yield f"generate with a static cache, model by {way}", lambda way=way: run(way)
        for batch in (1, 3):
            name = f"generate with a captured step, batch {batch}, model by {way}"
            yield name, lambda way=way, batch=batch: captured_step(way, batch)


def captured_step(way: str, batch: int) -> str | None:
    """A captured step writes the stock model's tokens, padded prompts and a second request included; its logits are to
    the bit those of the same step uncaptured."""
    import torch

    import moefuse.hf
    from moefuse.hf.capture import Step

    model, plain = make_model(way, torch.float32), make_model("stock", torch.float32)
    options = {"max_new_tokens": 150, "do_sample": False, "pad_token_id": 0}
    said = moefuse.hf.capture(model, batch, max_length=200)
    for padding in (0, 3, 0):
        ids = torch.randint(1, 128, (batch, 9), device=device())
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        have = model.generate(ids, attention_mask=mask, **options)
        want = plain.generate(ids, attention_mask=mask, **options)
        if not torch.equal(have, want):
            return f"{said}; padding {padding}: tokens differ: {have.tolist()} for {want.tolist()}"
    with torch.no_grad():
        step = Step(model, batch, 300)
        tokens, logits = torch.randint(0, 128, (200, batch), device=device()), []
        for graph in (step.logits, None):
            step.logits = graph
            step.prefill(ids, None)
            logits.append(torch.stack([step(token).clone() for token in tokens]))
    captured, uncaptured = logits
    return None if torch.equal(captured, uncaptured) else "the captured step's logits are not the uncaptured one's"


def graphs(_: dict[str, str]) -> Iterator[Check]:
    for T in (1, 4):
        yield f"two graphs captured on one stream, replayed at once on two, T={T}", lambda T=T: graphs_at_once(T)
    yield "a graph captured before anything ran outside one", captured_first
    for T in (1, 5, 40):
        for spec in (None, "Q4_K", "Q6_K"):
            name = f"linear after linear in a graph, T={T}, {spec or 'plain'} weights"
            yield name, lambda T=T, spec=spec: linear_in_a_graph(T, spec)


def graphs_at_once(T: int, replays: int = 200) -> str | None:
    """Each graph holds many blocks, so that the two overlap; every replay gives the bits of the eager call."""
    import torch

    block, x, _ = make_block(T, torch.bfloat16)
    inputs = [x, torch.randn_like(x)]

    def run(x: Any) -> Any:
        for _ in range(30):
            x = block(x)[1]
        return x

    with torch.inference_mode():
        for x in inputs:
            run(x)
        want = [run(x) for x in inputs]
        stream = torch.cuda.Stream()
        captured, outputs = [], []
        for x in inputs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                outputs.append(run(x))
            captured.append(graph)
        streams = [torch.cuda.Stream() for _ in captured]
        for turn in range(replays):
            for out in outputs:
                out.fill_(float("nan"))
            torch.cuda.synchronize()
            for graph, side in zip(captured, streams, strict=True):
                with torch.cuda.stream(side):
                    graph.replay()
            torch.cuda.synchronize()
            wrong = [i for i, out in enumerate(outputs) if not torch.equal(out, want[i])]
            if wrong:
                return f"replay {turn + 1}: graph {wrong[0] + 1} gave other bits than the eager call"
    return None


def linear_in_a_graph(T: int, spec: str | None) -> str | None:
    """Launches that may begin before the last one ends give the bits of calls one by one; rows, residuals and even
    weights are what the last one wrote."""
    import torch

    import moefuse
    from moefuse.testing.inputs import Inputs

    made = Inputs(torch.Generator().manual_seed(SEED), torch.bfloat16)
    query, key, back = (made.stack(spec, *shape).to(device()) for shape in ((2048, 1024), (512, 1024), (1024, 2048)))
    x, rows = made.normal(T, 1024).to(device()), made.weight(300, 512).to(device())

    def run(x: Any, between: Callable[[], None]) -> Any:
        for _ in range(10):
            q, k = moefuse.linear(x, (query, key), backend="triton")
            between()
            x = moefuse.linear(q, back, residual=x, backend="triton")
            between()
            weight = moefuse.linear(rows[:16], rows, backend="triton")  # [16, 300]
            between()
            x = x + moefuse.linear(moefuse.linear(k, rows, backend="triton"), weight, backend="triton").mean()
            between()
        return x

    with torch.inference_mode():
        want = run(x, torch.cuda.synchronize)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(x, lambda: None)
        for turn in range(50):
            out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(out, want):
                return f"replay {turn + 1} gave other bits than calls one by one"
    return None


def captured_first() -> str | None:
    """Counters that no eager call has made yet are part of the graph; kernels are compiled before, or cannot load."""
    import torch

    from moefuse.backends.triton.runtime import launch

    block, x, _ = make_block(2, torch.bfloat16)
    with torch.inference_mode():
        want = [block(x) for _ in range(3)][-1]
        torch.cuda.synchronize()
        launch._COUNTERS.clear()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = block(x)
        if launch._COUNTERS:
            return "a capture allocated counters and kept them"
        for _ in range(20):
            graph.replay()
        torch.cuda.synchronize()
        return None if all(map(torch.equal, found, want)) else "a replay gave other bits than the eager call"


def hopper(_: dict[str, str]) -> Iterator[Check]:
    """The product for many rows, which no case of the table is large enough for."""
    import torch

    from moefuse import backends

    facts = backends.BACKENDS[1].load().describe()
    yield "every fast path is on", lambda: "; ".join(f"{n}: {v}" for n, v in facts.items() if "off" in str(v)) or None
    for dtype in (torch.bfloat16, torch.float16):
        for spec in (None, "Q4_K"):
            for T in (512, 3000):
                name = f"experts, T={T}, {str(dtype)[6:]}, {spec or 'plain'} weights"
                yield name, lambda dtype=dtype, spec=spec, T=T: many_rows(T, dtype, spec)
    for spec in (None, "Q4_K", "Q6_K"):
        for apart in (False, True):
            for T in (64, 512, 3000):
                name = f"replayed moe, T={T}, {spec or 'plain'} weights{', gate and up apart' * apart}"
                yield name, lambda T=T, spec=spec, apart=apart: replayed(T, spec, apart)


def many_rows(T: int, dtype: Any, spec: str | None) -> str | None:
    import torch

    import moefuse
    from moefuse.testing.random_blocks import random_blocks

    torch.manual_seed(SEED)
    E, H, I, top_k = 8, 1024, 512, 2
    x = torch.randn(T, H, device=device(), dtype=dtype)
    stacks = [torch.randn(shape) * 0.03 for shape in ((E, 2 * I, H), (E, H, I))]
    if spec is None:
        gate_up, down = (stack.to(device(), dtype) for stack in stacks)
        wide = [gate_up.double(), down.double()]
    else:
        rng = torch.Generator().manual_seed(SEED)
        gate_up, down = (random_blocks(spec, stack.shape, rng, 0.03).to(device()) for stack in stacks)
        wide = [gate_up.dequantize(torch.float64), down.dequantize(torch.float64)]
    ids = torch.randint(0, E, (T, top_k), device=device(), dtype=torch.int32)
    weights = torch.rand(T, top_k, device=device())
    have = moefuse.experts(x, ids, weights, gate_up, down, backend="triton")
    want = moefuse.experts(x.double(), ids, weights.double(), *wide, backend="reference")
    return close("out", have, want, 1e-2 if dtype == torch.bfloat16 else 3e-3)


def replayed(T: int, spec: str | None, apart: bool) -> str | None:
    """A call with another layer's weights, replayed, has the bits of launches; descriptors hold its own addresses."""
    import torch

    import moefuse
    from moefuse.ops._core import replay, select
    from moefuse.testing.inputs import Inputs

    made = Inputs(torch.Generator().manual_seed(SEED), torch.bfloat16)
    E, H, I = 8, 1024, 512
    routing, results = moefuse.Routing(top_k=2), []
    with torch.inference_mode():
        for turn in range(4):
            rows = ((I, H), (I, H)) if apart else ((2 * I, H),)
            halves = tuple(made.stack(spec, E, *shape).to(device()) for shape in rows)
            down, router = made.stack(spec, E, H, I).to(device()), made.weight(E, H).to(device())
            x, gate_up = made.normal(T, H).to(device()), halves if apart else halves[0]
            for again in range(1 + (turn == 3)):
                if again:
                    known = any(record.again is not None for record in replay._RECORDS.values())
                    select.forget()
                out = moefuse.moe(x, router, gate_up, down, routing, residual=x, backend="triton")
                results.append(out)
    if not known:
        return "it was not recorded"
    return None if torch.equal(*results[-2:]) else "a replay gave other bits than launches"


def invariant(arguments: dict[str, str]) -> Iterator[Check]:
    """Batches of which each row must have the bits that its token has alone, inside moefuse.invariant."""
    import torch

    from moefuse.testing.cases import CASES
    from moefuse.testing.invariance import shares

    options: dict[str, Any] = {"dtypes": [getattr(torch, arguments["dtype"])]}
    if "only" in arguments:
        options["cases"] = [case for case in CASES if case.id in arguments["only"].split(",")]
    else:
        options["most"] = 1500
    part, parts = map(int, arguments["slice"].split("/"))
    drawn = shares([("triton", device())], int(arguments["batches"]), SEED, **options)
    for share in sorted(drawn, key=lambda share: -len(share.case.specs))[part::parts]:
        yield (
            f"{share.batches} batches of {share.case.id}",
            lambda share=share: "; ".join(share.tally().differing) or None,
        )


def placed(arguments: dict[str, str]) -> Iterator[Check]:
    """Experts in RAM and in slots, on real streams, while they move; and a model with them, captured."""
    steps = int(arguments.get("steps", 0))
    kind = arguments["kind"]
    for words in ("auto", "cpu") if kind == "models" else ():
        for streams in (False, True) if words == "auto" else (False,):
            name = f"a model, experts={words!r}{', prompts streamed' if streams else ''}"
            yield name, lambda words=words, streams=streams: placed_model(words, streams)
    for slots in () if kind == "models" else (3, 0):
        for streams in (False, True):
            name = f"{kind}, {slots} of 8 in slots, {'streamed' if streams else 'together'}"
            yield name, lambda slots=slots, streams=streams: placed_layer(kind, slots, streams, steps)


def rates_for(streams: bool) -> Any:
    """A machine on which long calls stream, or one on which they never do."""
    from moefuse.nn.rates import Rates

    return Rates(1e15, 1e15, 1.0, 1.0) if streams else Rates(1.0, 1.0, 1e12, 1e15)


def placed_layer(kind: str, slots: int, streams: bool, steps: int) -> str | None:
    """Calls whose experts change half way, so that others move in; all are launched before any is looked at."""
    import torch

    import moefuse
    from moefuse.nn import Placement, placement
    from moefuse.types import Activation, Stacks

    torch.manual_seed(SEED)
    E, H = 8, 256
    format, _, order = kind.partition(":")
    dtype = getattr(torch, kind, torch.bfloat16)  # blocks with float32 compile for minutes
    made: list[Any] = [torch.randn(E, H, H) / 16 for _ in range(3)]
    wide = [stack.to(dtype).double() for stack in made]
    if hasattr(torch, kind):
        made = [stack.to(dtype) for stack in made]
    else:
        made = [moefuse.quantize(stack, format).arranged(order) for stack in made]
        wide = [stack.dequantize().double() for stack in made]
    gate, up, down = wide
    placement.GROUP, placement.rates_of = 3 * 4 * 3 * H * H, lambda _: rates_for(streams)  # type: ignore[assignment]
    owner = Placement("auto")
    owner.budget, owner.room = 2**40, 0
    layer = owner.take("experts", Stacks(*made), Activation("silu"))
    owner._set_slots(slots)
    calls = []
    with torch.no_grad():
        for step in range(steps):
            T = (1, 3, 40)[step % 3]
            ids = (torch.randint(-1, 4, (T, 3)) + (4 if step > steps // 2 else 0)).int()
            x, weights = torch.randn(T, H).to(dtype), torch.rand(T, 3)
            calls.append((layer(x.to(device()), ids.to(device()), weights.to(device())), x, ids, weights))
    with owner.still():
        pass
    if slots == 3 and not layer.residency.moves:
        return "nothing moved"
    # With blocks both products round their rows to 8 bits.
    allowed = {torch.float32: 2e-5}.get(dtype, 2e-2 if hasattr(torch, kind) else 4e-2)
    for have, x, ids, weights in calls:
        want = moefuse.experts(x.double(), ids, weights.double(), (gate, up), down, backend="reference")
        wrong = close("out", have.cpu(), want, allowed)
        if wrong:
            return wrong
    return None


def placed_model(words: str, streams: bool) -> str | None:
    """Logits of a captured step are those of the same step uncaptured, and text that of the model without placement."""
    import copy

    import torch

    import moefuse.hf
    from moefuse.hf.capture import Step
    from moefuse.nn import Placement, placement

    placement.LEAST_ROOM = 0
    placement.GROUP, placement.rates_of = 2**14, lambda _: rates_for(streams)  # type: ignore[assignment]
    torch.manual_seed(SEED)
    base = make_model("stock", torch.float32).cpu()
    plain = copy.deepcopy(base).to(device())
    experts = sum(p.nbytes for name, p in base.named_parameters() if ".experts." in name)
    others = sum(p.nbytes for p in base.parameters()) - experts
    taken = torch.cuda.memory_allocated() if device() == "cuda" else 0
    owner = Placement(words, (taken + others + experts // 2) * 8 // 7)
    owner.accelerator.limit = lambda _: None  # torch takes memory by megabytes, more than this model
    moefuse.hf.patch(base, experts=owner)
    if owner.slots == 0 and words == "auto":
        return "the model got no slots"
    options = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    ids = torch.randint(1, 128, (1, 9), device=device())
    said = moefuse.hf.capture(base, 1, max_length=120)
    have, want = base.generate(ids, **options), plain.generate(ids, **options)
    if not torch.equal(have, want):
        return f"{said}; tokens differ: {have.tolist()} for {want.tolist()}"
    with torch.no_grad(), owner.still():  # what moves changes bits
        step = Step(base, 1, 120)
        tokens, logits = torch.randint(0, 128, (50, 1), device=device()), []
        for graph in (step.logits, None):
            step.logits = graph
            step.prefill(ids, None)
            logits.append(torch.stack([step(token).clone() for token in tokens]))
    captured, uncaptured = logits
    if not torch.equal(captured, uncaptured):
        return "the captured step's logits are not the uncaptured one's"
    moefuse.hf.unpatch(base)
    return None if base.device.type == "cpu" else "unpatch left the model on the GPU"


CHECKS: dict[str, Callable[[dict[str, str]], Iterator[Check]]] = {
    "cases": table, "strange": table, "compile": compiled, "generate": generated, "graphs": graphs, "hopper": hopper,
    "invariant": invariant, "placed": placed, "sanitize": table,
}  # fmt: skip


def work(section: str, arguments: dict[str, str], start: int, report: Path) -> int:
    """Run the checks of one job from ``start`` on, a line of the report for each; DEVICE_LOST where CUDA is no more."""
    faulthandler.enable()
    with report.open("a", encoding="utf-8") as file:

        def say(**line: Any) -> None:
            file.write(json.dumps(line) + "\n")
            file.flush()

        index = -1
        try:
            for index, (name, check) in enumerate(CHECKS[section](arguments)):
                if index < start:
                    continue
                say(begun=index, name=name)
                began = time.monotonic()
                try:
                    wrong = check()
                    lost = False
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                    lost = (
                        "CUDA error" in str(error)
                        or "[CUDA]" in str(error)
                        or type(error).__name__ == "AcceleratorError"
                    )
                    traceback.print_exc()
                say(done=index, name=name, wrong=wrong, seconds=round(time.monotonic() - began, 2))
                if lost:
                    return DEVICE_LOST
        except Exception as error:  # the list of checks itself: a missing package, an option that is not there
            say(done=index + 1, name="its checks", wrong=f"{type(error).__name__}: {error}", seconds=0)
            traceback.print_exc()
    return 0


# The run: jobs in several processes, each begun again behind a check that it did not survive.


def jobs(sections: list[str], dry: bool, batches: int) -> Iterator[Job]:
    few = {"only": "route/one_token,glu/gelu,experts/decode"} if dry else {}
    dtypes = ("float32",) if dry else DTYPES
    if "compile" in sections:
        for mode in MODES[: 1 if dry else None]:
            yield Job("compile", f"compile-{mode}", {"mode": mode})
        yield Job("compile", "generate", {"checks": "generate"})
    for section in ("graphs", "hopper"):
        if section in sections and not dry:
            yield Job(section, section, {})
    for section in ("cases", "strange"):
        if section in sections:
            for dtype in dtypes:
                slices = 1 if dry else SLICES[dtype]
                for part in range(slices):
                    arguments = {"dtype": dtype, "slice": f"{part}/{slices}", **few}
                    if section == "strange":
                        arguments["strange"] = "1"
                    yield Job(section, f"{section}-{dtype}-{part}", arguments)
    if "invariant" in sections:
        for dtype in dtypes:
            slices = 1 if dry else 5
            for part in range(slices):
                arguments = {
                    "dtype": dtype,
                    "batches": "4" if dry else str(batches),
                    "slice": f"{part}/{slices}",
                    **few,
                }
                yield Job("invariant", f"invariant-{dtype}-{part}", arguments)
    if "placed" in sections and not dry:
        sanitized = ("compute-sanitizer", "--tool", "memcheck")
        yield Job("placed", "placed-models", {"kind": "models"})
        for kind in ("Q4_K:interleaved", "bfloat16", "float32", "Q4_K", "Q8_0"):
            name = kind.replace(":", "-")
            yield Job("placed", f"placed-{name}", {"kind": kind, "steps": "120"})
            uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            # Moves begin with the 17th call.
            yield Job("placed", f"placed-memcheck-{name}", {"kind": kind, "steps": "36"}, sanitized, uncached)
    if "sanitize" in sections and not dry:
        for tool in CLEAN:
            for part in range(SANITIZED_SLICES):
                yield Job(
                    "sanitize", f"{tool}-{part}", {"dtype": "bfloat16", "slice": f"{part}/{SANITIZED_SLICES}"},
                    ("compute-sanitizer", "--tool", tool), {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                )  # fmt: skip


def run_job(job: Job, out: Path, ends: float, per_job: float, threads: dict[str, str]) -> list[dict[str, Any]]:
    """One line for each check: name, what went wrong or None, seconds."""
    if job.prefix and shutil.which(job.prefix[0]) is None:
        return [{"name": job.name, "wrong": f"not run: {job.prefix[0]} is not here", "seconds": 0}]
    report, log = out / f"{job.name}.jsonl", out / f"{job.name}.log"
    report.unlink(missing_ok=True)
    ends = min(ends, time.monotonic() + per_job)
    start, found = 0, []
    with log.open("w", encoding="utf-8") as output:
        while True:
            command = [
                *job.prefix, sys.executable, __file__, "--work", job.arguments.get("checks", job.section),
                "--arguments", json.dumps(job.arguments), "--start", str(start), "--report", str(report),
            ]  # fmt: skip
            left = ends - time.monotonic()
            if left <= 0:
                found.append({"name": f"{job.name} from check {start + 1} on", "wrong": "not run: no time left"})
                break
            process = subprocess.Popen(
                command, stdout=output, stderr=output, env=threads | os.environ | job.environment
            )
            try:
                code: int | None = process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # where it waits is then in its log
                try:
                    process.wait(timeout=5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                code = None
            lines = [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []
            done = {line["done"] for line in lines if "done" in line}
            stuck = [line for line in lines if "begun" in line and line["begun"] not in done]
            found = [line for line in lines if "done" in line]
            for line in stuck:
                why = "no end within its time" if code is None else f"the process ended with {code}"
                found.append({"name": line["name"], "wrong": why, "seconds": 0})
            if code is None:
                found.append({"name": f"{job.name}: what follows", "wrong": "not run: no time left"})
            if code == 0 or code is None or not lines:
                if code not in (0, None) and not lines:
                    found.append({"name": job.name, "wrong": f"the process ended with {code}, see {log}"})
                break
            start = max(line.get("done", line.get("begun", -1)) for line in lines) + 1
            for line in stuck:  # known to be lost, not to be reported again
                with report.open("a", encoding="utf-8") as file:
                    record = {"done": line["begun"], "name": line["name"], "wrong": f"the process ended with {code}"}
                    file.write(json.dumps(record) + "\n")
    if job.prefix:
        text = log.read_text(encoding="utf-8", errors="replace")
        tool = job.prefix[2]
        clean = CLEAN[tool] in text
        found.append({"name": f"{job.name}: summary", "wrong": None if clean else f"{CLEAN[tool]!r} is not in {log}"})
    return found


def told_in_markdown(found: dict[str, list[dict[str, Any]]], seconds: float) -> str:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: dry"
    versions = [f"torch {torch.__version__}", f"Python {sys.version.split()[0]}"]
    for package in ("triton", "transformers"):
        try:
            versions.append(f"{package} {__import__(package).__version__}")
        except ImportError:
            versions.append(f"no {package}")
    lines = [
        f"{name}; {', '.join(versions)}; {seconds:.0f} s",
        "",
        "| section | passed | failed | not run |",
        "|---" * 4 + "|",
    ]
    for section, checks in found.items():
        missed = sum(str(c.get("wrong") or "").startswith("not run") for c in checks)
        failed = sum(c.get("wrong") is not None for c in checks) - missed
        lines.append(f"| {section} | {len(checks) - failed - missed} | {failed} | {missed} |")
    wrong = [(s, c) for s, checks in found.items() for c in checks if c.get("wrong") is not None]
    if wrong:
        lines += ["", "| section | check | what went wrong |", "|---" * 3 + "|"]
        lines += [
            f"| {s} | {c['name']} | {str(c['wrong']).replace('|', '/').splitlines()[0][:300]} |" for s, c in wrong
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas between")
    parser.add_argument("--out", type=Path, default=Path("card"))
    parser.add_argument("--budget", type=float, default=460, help="seconds for the whole run")
    parser.add_argument("--job-budget", type=float, help="seconds for a job, in place of each section's own")
    parser.add_argument("--batches", type=int, default=1000, help="invariant: of each type")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--work", choices=CHECKS, help=argparse.SUPPRESS)
    parser.add_argument("--arguments", type=json.loads, default={}, help=argparse.SUPPRESS)
    parser.add_argument("--start", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(given.work, given.arguments, given.start, given.report)

    sections = given.only.split(",")
    unknown = [name for name in sections if name not in SECTIONS]
    if unknown:
        parser.error(f"--only takes {', '.join(SECTIONS)}, got {', '.join(unknown)}")
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sections}
    # torch's threads of one process would wait for cores that another's hold
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // given.processes))}
    with ThreadPoolExecutor(given.processes) as pool:
        running = {
            pool.submit(
                run_job, job, given.out, began + given.budget, given.job_budget or SECTIONS[job.section], threads
            ): job
            for job in jobs(sections, given.dry, given.batches)
        }
        for future in as_completed(running):
            job = running[future]
            checks = future.result()
            found[job.section] += checks
            bad = sum(check.get("wrong") is not None for check in checks)
            print(f"{time.monotonic() - began:5.0f} s  {job.name}: {len(checks) - bad} of {len(checks)}", flush=True)
    text = told_in_markdown(found, time.monotonic() - began)
    (given.out / "support.md").write_text(text, encoding="utf-8")
    (given.out / "results.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(text)
    return int(any(check.get("wrong") is not None for checks in found.values() for check in checks))


if __name__ == "__main__":
    sys.exit(main())
