"""A layer of a GGUF file as a module: every architecture against its formula in float64, and what is refused."""

import subprocess
import sys
import textwrap
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from moefuse import QuantTensor, Routing
from moefuse.nn import MoE
from moefuse.nn.from_gguf import FAMILIES, expert_layers
from moefuse.quant.gguf import read, write
from moefuse.testing.compare import difference
from moefuse.testing.random_blocks import random_blocks

E, H, I, SHARED, TOP_K = 8, 256, 256, 512, 3
LAYER = 2


class Made:
    """A file with one layer of experts, and its numbers in float64."""

    def __init__(self, architecture: str, rng: torch.Generator, **keys: Any) -> None:
        self.rng = rng
        self.tensors: dict[str, Tensor | QuantTensor] = {"blk.0.ffn_gate.weight": torch.ones(2, 2)}
        self.metadata = {
            "general.architecture": architecture,
            f"{architecture}.expert_count": E,
            f"{architecture}.expert_used_count": TOP_K,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        } | {f"{architecture}.{key}": value for key, value in keys.items()}

    def add(self, name: str, *shape: int, format: str | None = None, around: float = 0.0) -> None:
        made: Tensor | QuantTensor
        if format is None:
            made = torch.randn(shape, generator=self.rng) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1) + around
        else:
            made = random_blocks(format, shape, self.rng, shape[-1] ** -0.5)
        self.tensors[f"blk.{LAYER}.{name}"] = made

    def experts(self, gate: str = "Q4_K", up: str = "Q5_K", down: str = "Q6_K") -> "Made":
        self.add("ffn_gate_inp.weight", E, H)
        self.add("ffn_gate_exps.weight", E, I, H, format=gate)
        self.add("ffn_up_exps.weight", E, I, H, format=up)
        self.add("ffn_down_exps.weight", E, H, I, format=down)
        return self

    def shared(self, weighed: bool) -> "Made":
        self.add("ffn_gate_shexp.weight", SHARED, H, format="Q8_0")
        self.add("ffn_up_shexp.weight", SHARED, H, format="Q4_0")
        self.add("ffn_down_shexp.weight", H, SHARED, format="Q6_K")
        if weighed:
            self.add("ffn_gate_inp_shexp.weight", H)
        return self

    def save(self, folder: Path) -> Path:
        write(folder / "model.gguf", self.metadata, self.tensors)
        return folder / "model.gguf"

    def __getitem__(self, name: str) -> Tensor:
        value = self.tensors[f"blk.{LAYER}.{name}"]
        return value.dequantize(torch.float64) if isinstance(value, QuantTensor) else value.double()

    def has(self, name: str) -> bool:
        return f"blk.{LAYER}.{name}" in self.tensors


def silu(g: Tensor, u: Tensor) -> Tensor:
    return torch.nn.functional.silu(g) * u


def mlp(made: Made, v: Tensor, e: int, act: Any) -> Tensor:
    def bias(part: str) -> Any:
        return made[f"ffn_{part}_exps.bias"][e] if made.has(f"ffn_{part}_exps.bias") else 0

    if made.has("ffn_gate_up_exps.weight"):
        g, u = (made["ffn_gate_up_exps.weight"][e] @ v).chunk(2)
    else:
        g, u = (made[f"ffn_{part}_exps.weight"][e] @ v + bias(part) for part in ("gate", "up"))
    return made["ffn_down_exps.weight"][e] @ act(g, u) + bias("down")


def shared(made: Made, v: Tensor) -> Tensor:
    g, u = made["ffn_gate_shexp.weight"] @ v, made["ffn_up_shexp.weight"] @ v
    out = made["ffn_down_shexp.weight"] @ silu(g, u)
    return out * torch.sigmoid(made["ffn_gate_inp_shexp.weight"] @ v) if made.has("ffn_gate_inp_shexp.weight") else out


def weighed(made: Made, v: Tensor, weights: Tensor, ids: Tensor, act: Any = silu) -> Tensor:
    return sum(w * mlp(made, v, int(e), act) for w, e in zip(weights, ids, strict=True))


def softmax_top(made: Made, v: Tensor, renormalize: bool) -> tuple[Tensor, Tensor]:
    top = torch.softmax(made["ffn_gate_inp.weight"] @ v, 0).topk(TOP_K)
    return (top.values / top.values.sum() if renormalize else top.values), top.indices


def plain(renormalize: bool) -> Any:
    def block(made: Made, x: Tensor) -> Tensor:
        out = weighed(made, x, *softmax_top(made, x, renormalize))
        return out + shared(made, x) if made.has("ffn_down_shexp.weight") else out

    return block


def deepseek_v3(made: Made, x: Tensor) -> Tensor:
    scores = torch.sigmoid(made["ffn_gate_inp.weight"] @ x)
    chosen = scores + made["exp_probs_b.bias"]
    groups = chosen.view(4, 2).topk(2, -1).values.sum(-1).topk(2).indices
    kept = torch.full_like(chosen, -torch.inf).view(4, 2)
    kept[groups] = chosen.view(4, 2)[groups]
    ids = kept.flatten().topk(TOP_K).indices
    return weighed(made, x, scores[ids] / scores[ids].sum() * 2.5, ids) + shared(made, x)


def gpt_oss(made: Made, x: Tensor) -> Tensor:
    top = (made["ffn_gate_inp.weight"] @ x + made["ffn_gate_inp.bias"]).topk(TOP_K)

    def act(g: Tensor, u: Tensor) -> Tensor:
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        return g * torch.sigmoid(1.702 * g) * (u + 1)

    return weighed(made, x, torch.softmax(top.values, 0), top.indices, act)


def gemma4(made: Made, x: Tensor) -> Tensor:
    unit = x * torch.rsqrt(x.square().mean() + 1e-5)
    scores = torch.softmax(made["ffn_gate_inp.weight"] @ (unit * made["ffn_gate_inp.scale"] * H**-0.5), 0)
    top = scores.topk(TOP_K)
    weights = top.values / top.values.sum() * made["ffn_down_exps.scale"][top.indices]
    act = lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u  # noqa: E731
    return weighed(made, unit * made["pre_ffw_norm_2.weight"], weights, top.indices, act)


def make_gpt_oss(rng: torch.Generator) -> Made:
    made = Made("gpt-oss", rng).experts("MXFP4", "MXFP4", "MXFP4")
    made.add("ffn_gate_inp.bias", E)
    for part in ("gate", "up", "down"):
        made.add(f"ffn_{part}_exps.bias", E, I)
    return made


def make_gemma4(rng: torch.Generator) -> Made:
    made = Made("gemma4", rng)
    made.add("ffn_gate_inp.weight", E, H)
    made.add("ffn_gate_inp.scale", H, around=16.0)
    made.add("ffn_gate_up_exps.weight", E, 2 * I, H, format="Q6_K")
    made.add("ffn_down_exps.weight", E, H, I, format="Q8_0")
    made.add("ffn_down_exps.scale", E, around=1.0)
    made.add("pre_ffw_norm_2.weight", H, around=1.0)
    return made


def make_deepseek(rng: torch.Generator) -> Made:
    keys = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5, "expert_group_count": 4,
            "expert_group_used_count": 2}  # fmt: skip
    made = Made("deepseek2", rng, **keys).experts().shared(weighed=False)
    made.add("exp_probs_b.bias", E)
    return made


ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (lambda rng: Made("llama", rng).experts("Q5_0", "Q4_1", "Q3_K"), plain(True)),
    "qwen2moe": (lambda rng: Made("qwen2moe", rng).experts().shared(weighed=True), plain(False)),
    "qwen3moe": (lambda rng: Made("qwen3moe", rng).experts("Q4_K", "Q4_K", "Q6_K"), plain(True)),
    "qwen3next": (lambda rng: Made("qwen3next", rng).experts().shared(weighed=True), plain(True)),
    "qwen35moe": (lambda rng: Made("qwen35moe", rng).experts().shared(weighed=True), plain(True)),
    "olmoe": (lambda rng: Made("olmoe", rng).experts("IQ4_NL", "IQ4_XS", "Q2_K"), plain(False)),
    "granitemoe": (lambda rng: Made("granitemoe", rng).experts().shared(weighed=False), plain(True)),
    "gpt-oss": (make_gpt_oss, gpt_oss),
    "gemma4": (make_gemma4, gemma4),
    "deepseek2": (make_deepseek, deepseek_v3),
    "glm4moe": (lambda rng: glm(rng), deepseek_v3),
}


def glm(rng: torch.Generator) -> Made:
    """As DeepSeek-V3, the score being the architecture's own."""
    made = make_deepseek(rng)
    made.metadata = {key.replace("deepseek2", "glm4moe"): value for key, value in made.metadata.items()}
    made.metadata["general.architecture"] = "glm4moe"
    del made.metadata["glm4moe.expert_gating_func"]
    return made


def test_every_architecture_has_a_formula() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_against_the_formula(architecture: str, target: tuple[str, str], tmp_path: Path, rng: torch.Generator) -> None:
    backend, device = target
    make, formula = ARCHITECTURES[architecture]
    made = make(rng)
    block = MoE.from_gguf(made.save(tmp_path), LAYER, exact=True).to(device)
    x = torch.randn(5, H, generator=rng)
    want = torch.stack([formula(made, row) for row in x.double()])
    got = block(x.to(device), backend=backend).cpu()
    assert difference(got, want).worst < 1e-5


@pytest.fixture
def path(tmp_path: Path, rng: torch.Generator) -> Path:
    return Made("qwen2moe", rng).experts().shared(weighed=True).save(tmp_path)


def test_experts_stay_in_the_file(path: Path) -> None:
    file = read(path)
    block = MoE.from_gguf(file, LAYER)
    base = file._maps[0].data_ptr()
    for name, part in (("gate_up", "gate"), ("up", "up"), ("down", "down")):
        assert getattr(block, name).data_ptr() == base + file.infos[f"blk.{LAYER}.ffn_{part}_exps.weight"].offset
    assert block.specs["gate_up"] == "Q4_K"
    assert MoE.from_gguf(file, LAYER, exact=True).specs["down"] == "Q6_K:exact"
    assert not any(value.requires_grad for value in block.parameters())
    assert "gate_up=Q4_K" in repr(block)
    assert f"hidden={H}, intermediate={I}, num_experts={E}, shared_intermediate={SHARED}" in repr(block)


def test_module_verbs(path: Path) -> None:
    """``to`` leaves bytes alone; a state loads into its like alone; the router can be trained."""
    block = MoE.from_gguf(path, LAYER, exact=True)
    x = torch.randn(4, H)
    want = block(x)
    half = MoE.from_gguf(path, LAYER, exact=True).to(torch.bfloat16)
    assert half.gate_up.dtype == torch.uint8
    assert half.router.dtype == torch.bfloat16
    assert difference(half(x.bfloat16()), half(x.bfloat16(), backend="reference").double()).worst < 0.02
    state = block.state_dict()
    assert {"router", "gate_up", "up", "down", "specs", "shared_up"} <= set(state)
    other = MoE.from_gguf(path, LAYER, exact=True)
    with torch.no_grad():
        other.router.zero_()
    outer, copy = torch.nn.ModuleDict({"moe": other}), torch.nn.ModuleDict({"moe": block})
    assert outer.load_state_dict(copy.state_dict()).missing_keys == []
    assert torch.equal(other(x), want)
    with pytest.raises(ValueError, match="MoE: the state must have specs"):
        MoE.from_gguf(path, LAYER).load_state_dict(state)
    with pytest.raises(ValueError, match=r"MoE: the state must have specs \{\}, got"):
        MoE(H, I, E, Routing(TOP_K)).load_state_dict(state)
    block.router.requires_grad_()
    block(x).square().sum().backward()
    assert block.router.grad is not None
    assert (block.router.grad != 0).any()


@pytest.mark.parametrize("assign", [False, True])
def test_moving_arranges_blocks(path: Path, moves: Any, assign: bool) -> None:
    """A state is in the file's order, wherever the module is."""
    to_gpu, to_cpu = moves
    block, x = MoE.from_gguf(path, LAYER, exact=True), torch.randn(4, H)
    want, specs, state = block(x), dict(block.specs), deepcopy(block.state_dict())
    to_gpu(block)
    assert {spec.split(":")[1] for spec in block.specs.values()} == {"planes"}
    assert "gate_up=Q4_K:planes:exact" in repr(block)
    assert not torch.equal(block.gate_up, state["gate_up"])
    assert torch.equal(block(x), want)
    assert torch.equal(deepcopy(block)(x), want)
    moved = block.state_dict()
    assert moved.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(moved[name], value), name
    other = MoE.from_gguf(path, LAYER, exact=True)
    for name in other.specs:
        getattr(other, name).zero_()
    for place in moves:
        place(other).load_state_dict(moved, assign=assign)
        assert torch.equal(other(x), want)
        assert torch.equal(moved["down"], state["down"]), "what was given stays as it was"
    assert to_cpu(block).specs == specs
    assert torch.equal(block.gate_up, state["gate_up"])
    assert to_gpu(block).to("meta").specs == specs


def test_compiled(path: Path) -> None:
    block = MoE.from_gguf(path, LAYER, exact=True)
    x = torch.randn(4, H)
    torch._dynamo.reset()
    got = torch.compile(block, fullgraph=True, backend="aot_eager")(x)
    assert difference(got, block(x).double()).worst < 1e-6
    torch._dynamo.reset()


def test_plain_stacks(tmp_path: Path, rng: torch.Generator) -> None:
    made = Made("olmoe", rng)
    made.add("ffn_gate_inp.weight", E, H)
    for part in ("gate", "up", "down"):
        made.add(f"ffn_{part}_exps.weight", E, I, H)
    block = MoE.from_gguf(made.save(tmp_path), LAYER)
    assert block.specs == {}
    x = torch.randn(3, H)
    want = torch.stack([plain(False)(made, row) for row in x.double()])
    assert difference(block(x), want).worst < 1e-5


def broken(change: Any, rng: torch.Generator, architecture: str = "qwen3moe") -> Made:
    made = Made(architecture, rng).experts()
    change(made)
    return made


REFUSED = {
    "dense": (lambda m: m.tensors.clear(), r"layer must have experts \(no layer of this file does\), got 2"),
    "old_style": (
        lambda m: (m.tensors.clear(), m.tensors.update({"blk.2.ffn_gate.0.weight": torch.ones(2, 2)})),
        "experts must be stacked",
    ),
    "no_down": (lambda m: m.tensors.pop("blk.2.ffn_down_exps.weight"), r"must have blk\.2\.ffn_down_exps\.weight"),
    "shape": (lambda m: m.add("ffn_up_exps.weight", E, I + 1, H), r"must have shape \[8, 256, 256\], got \[8, 257"),
    "rank": (lambda m: m.add("ffn_down_exps.weight", H, I), r"must have shape \[8, 256, any\], got \[256, 256\]"),
    "some_bias": (lambda m: m.add("ffn_down_exps.bias", E, H), "must all have biases or none"),
    "gating": (lambda m: m.metadata.update({"qwen3moe.expert_gating_func": 9}), "must be one of 1, 2, 3, 4, got 9"),
    "scale": (lambda m: m.metadata.update({"qwen3moe.expert_weights_scale": "x"}), "as a finite number, got 'x'"),
    "top_k": (lambda m: m.metadata.update({"qwen3moe.expert_used_count": ["x"]}), r"as a whole number, got \['x'\]"),
    "no_top_k": (lambda m: m.metadata.pop("qwen3moe.expert_used_count"), "as a whole number, got None"),
    "latent": (lambda m: m.add("ffn_latent_down.weight", H, H), r"got blk\.2\.ffn_latent_down\.weight"),
    "hash": (lambda m: m.add("ffn_gate_tid2eid", H, H), r"got blk\.2\.ffn_gate_tid2eid"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, tmp_path: Path, rng: torch.Generator) -> None:
    change, message = REFUSED[what]
    with pytest.raises(ValueError, match=f"from_gguf: .*{message}"):
        MoE.from_gguf(broken(change, rng).save(tmp_path), LAYER)


def test_an_unknown_architecture_is_named(tmp_path: Path, rng: torch.Generator) -> None:
    path = Made("llama4", rng).experts().save(tmp_path)
    with pytest.raises(ValueError, match=r"the architecture must be one of deepseek2, .*got llama4"):
        MoE.from_gguf(path, LAYER)


def test_one_value_per_layer(tmp_path: Path, rng: torch.Generator) -> None:
    path = Made("qwen3moe", rng, expert_used_count=[1, 1, 4, 1]).experts().save(tmp_path)
    assert expert_layers(read(path)) == [LAYER]
    assert MoE.from_gguf(path, LAYER).routing == Routing(top_k=4)


BIG = """
    import sys, time
    import torch
    from moefuse.nn import MoE
    from moefuse.quant.gguf import read

    def resident():
        return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) / 1024

    before, start = resident(), time.perf_counter()
    file = read(sys.argv[1])
    blocks = [MoE.from_gguf(file, layer) for layer in range(int(sys.argv[2]))]
    print(time.perf_counter() - start, resident() - before, sum(info.nbytes for info in file.infos.values()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_two_gigabytes_are_mapped_not_read(tmp_path: Path) -> None:
    """A sparse file of 2 GiB: mapped, and every layer built, in under a second and 200 MB."""
    path, experts, hidden, width, layers = tmp_path / "big.gguf", 64, 2048, 1024, 9
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_expert_used_count(8)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token {i}" for i in range(150_000)])
    kind = gguf.GGMLQuantizationType
    for layer in range(layers):
        prefix = f"blk.{layer}.ffn_"
        shapes = {
            "gate_inp": (experts, hidden),
            "gate_exps": (experts, width, hidden),
            "up_exps": (experts, width, hidden),
            "down_exps": (experts, hidden, width),
        }
        for part, shape in shapes.items():
            dtype, count = (kind.F32, 4) if part == "gate_inp" else (kind.Q4_K, 144 / 256)
            writer.add_tensor_info(
                f"{prefix}{part}.weight", shape, "float32", int(count * torch.Size(shape).numel()), dtype
            )
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file, writer.close):
        step()
    with path.open("r+b") as file:
        file.truncate(2**31)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(BIG), str(path), str(layers)], capture_output=True, text=True, check=True
    )
    seconds, megabytes, size = map(float, done.stdout.split())
    print(f"{size / 2**30:.2f} GiB of tensors, {seconds:.3f} s, {megabytes:.0f} MB")
    assert size > 2**30
    assert megabytes < 200
    # The figure is 1 s on a machine of its own; tests share theirs, and reading 2 GiB would take longer than this.
    assert seconds < 10
