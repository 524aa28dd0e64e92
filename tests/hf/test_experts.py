"""The experts implementation on single modules: types, sentinels, own gates, compiling, memory."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import families, tiny_model
from torch import Tensor, nn
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.activations import ACT2FN
from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
from transformers.integrations.moe import ExpertsInterface, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moefuse import config
from moefuse.hf.experts import experts_forward, known_activation
from moefuse.hf.support import on_interface
from moefuse.testing.compare import difference

E, H, I, K = 6, 32, 24, 2


def make(kind: type[nn.Module] = Qwen3MoeExperts, config: type = Qwen3MoeConfig) -> nn.Module:
    sizes = {
        "hidden_size": H, "intermediate_size": I, "moe_intermediate_size": I, "num_experts": E, "num_local_experts": E,
    }  # fmt: skip
    settings = config(**sizes)
    settings._experts_implementation = "eager"
    module = kind(settings)
    for value in module.parameters():
        nn.init.normal_(value, std=value.shape[1 if module.is_transposed else -1] ** -0.5 if value.dim() == 3 else 0.1)
    return module.eval()


def inputs(T: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.stack([torch.randperm(E)[:top_k] for _ in range(T)]) if T else torch.empty(0, top_k, dtype=torch.long)
    return torch.randn(T, H), ids, torch.rand(T, top_k)


def eager(module: nn.Module, *args: Tensor) -> Tensor:
    module.config._experts_implementation = "eager"
    with torch.no_grad():
        return module(*args).double()


def ours(module: nn.Module, *args: Tensor) -> Tensor:
    module.config._experts_implementation = "moefuse"
    with torch.no_grad():
        return module(*args)


MODULES = {
    "plain": (Qwen3MoeExperts, Qwen3MoeConfig),
    "mixtral": (MixtralExperts, MixtralConfig),
    "gpt_oss": (GptOssExperts, GptOssConfig),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("T", [1, 7, 64])
def test_agrees_with_eager(kind: str, T: int) -> None:
    module = make(*MODULES[kind])
    args = inputs(T)
    assert difference(ours(module, *args), eager(module, *args)).worst < 1e-5


def test_dispatched_slots_one_per_row() -> None:
    module = make()
    args = inputs(9, top_k=1)
    args = (*args[:2], torch.ones_like(args[2]))
    assert difference(ours(module, *args), eager(module, *args)).worst < 1e-5


def test_no_tokens() -> None:
    assert ours(make(), *inputs(0)).shape == (0, H)
    assert ours(make(*MODULES["gpt_oss"]), *inputs(0)).shape == (0, H)


@pytest.mark.parametrize("kind", MODULES)
def test_sentinel_slots_contribute_nothing(kind: str) -> None:
    module = make(*MODULES[kind])
    x, ids, weights = inputs(12, top_k=3)
    live = torch.rand(12, 3) < 0.6
    live[0] = False
    want = eager(module, x, ids, weights.masked_fill(~live, 0))
    got = ours(module, x, ids.masked_fill(~live, E), weights.masked_fill(~live, 0))
    assert difference(got[1:], want[1:]).worst < 1e-5
    assert torch.equal(got[0], torch.zeros(H))


@pytest.mark.parametrize("weights_in", [torch.float32, torch.bfloat16])
def test_bfloat16_is_as_near_to_the_truth_as_eager(weights_in: torch.dtype) -> None:
    module = make().bfloat16()
    x, ids, weights = inputs(33)
    x, weights = x.bfloat16(), weights.to(weights_in)
    truth = eager(copy.deepcopy(module).double(), x.double(), ids, weights.double())
    got = ours(module, x, ids, weights)
    assert got.dtype == torch.bfloat16
    assert difference(got, truth).rms <= max(difference(eager(module, x, ids, weights), truth).rms, 2**-8)


def test_the_roundings_that_transformers_own_paths_share() -> None:
    """float32 rounded after every step is what they compute for gpt-oss; ours, rounded once, is nearer to float64."""
    module = make(GptOssExperts, GptOssConfig).bfloat16()
    x, ids, weights = inputs(64)
    x, weights = x.bfloat16(), weights.bfloat16()

    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().float()

    slots = []
    with torch.no_grad():
        gate_up, down = module.gate_up_proj.float(), module.down_proj.float()
        for j in range(K):
            e = ids[:, j]
            z = rounded(torch.einsum("th,tho->to", x.float(), gate_up[e]))
            z = rounded(z + module.gate_up_proj_bias[e].float())
            g, u = z[..., ::2].clamp(max=module.limit), z[..., 1::2].clamp(-module.limit, module.limit)
            sigmoid = rounded(torch.sigmoid(rounded(g * module.alpha)))
            h = rounded(rounded(u + 1) * rounded(g * sigmoid))
            y = rounded(torch.einsum("ti,tih->th", h, down[e]))
            y = rounded(y + module.down_proj_bias[e].float())
            slots.append(rounded(y * weights[:, j, None].float()))
        module.config._experts_implementation = "batched_mm"
        theirs = module(x, ids, weights)
    # A sum in another order may fall to the other side of a rounding now and then.
    assert (sum(slots).bfloat16() == theirs).double().mean() > 0.99
    got = ours(module, x, ids, weights)
    truth = eager(copy.deepcopy(module).double(), x.double(), ids, weights.double())
    assert difference(got, truth).rms < 0.6 * difference(theirs, truth).rms


def test_rows_wider_than_the_weights_as_under_autocast() -> None:
    module = make().bfloat16()
    x, ids, weights = inputs(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = ours(module, x, ids, weights)
    assert got.dtype == torch.float32
    assert torch.equal(got, ours(module, x.bfloat16(), ids, weights).float())


def test_rows_narrower_than_the_weights() -> None:
    module = make()
    x, ids, weights = inputs(5)
    got = ours(module, x.bfloat16(), ids, weights)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, ours(module, x.bfloat16().float(), ids, weights).bfloat16())


def test_float64_runs() -> None:
    module = make().double()
    x, ids, weights = inputs(5)
    assert difference(ours(module, x.double(), ids, weights), eager(module, x.double(), ids, weights)).worst < 1e-12


@use_experts_implementation
class OddExperts(nn.Module):
    """Experts with a gate that no rule of ours has."""

    def __init__(self, _: Qwen3MoeConfig) -> None:
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return torch.sin(gate) * up + 0.25

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        z = torch.einsum("th,tkoh->tko", x, self.gate_up_proj[ids])
        return torch.einsum("tki,tkhi,tk->th", self._apply_gate(z), self.down_proj[ids], weights)


def test_an_unknown_gate_runs_between_our_products() -> None:
    module = make(OddExperts)
    assert known_activation(module) is None
    args = inputs(11)
    assert difference(ours(module, *args), eager(module, *args)).worst < 1e-5
    x, ids, weights = args
    dropped = ours(module, x, torch.full_like(ids, E), weights)
    assert torch.equal(dropped, torch.zeros_like(x)), "a gate that maps 0 to 0.25 must not leak through sentinels"


def test_a_norm_after_the_experts_does_not_leak_through_sentinels() -> None:
    module = make()
    module.has_post_expert_norm, module.post_expert_norm = True, nn.LayerNorm(H)
    nn.init.ones_(module.post_expert_norm.bias)
    x, ids, weights = inputs(5)
    assert torch.equal(ours(module, x, torch.full_like(ids, E), weights), torch.zeros_like(x))
    assert float(ours(module, x, ids, weights).abs().min(-1).values.max()) > 0


def test_a_learned_activation_is_not_guessed() -> None:
    module = make()
    module.act_fn = nn.PReLU()
    assert known_activation(module) is None
    args = inputs(5)
    assert difference(ours(module, *args), eager(module, *args)).worst < 1e-5


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "mish"])
def test_every_activation_of_transformers(act: str) -> None:
    module = make()
    module.act_fn = ACT2FN[act]
    known = known_activation(module)
    assert (known is None) == (act in ("quick_gelu", "mish"))
    args = inputs(6)
    assert difference(ours(module, *args), eager(module, *args)).worst < 1e-5


@pytest.mark.parametrize("kind", ["plain", "gpt_oss"])
def test_compiles_whole(kind: str) -> None:
    module = make(*MODULES[kind])
    args = inputs(8)
    want = eager(module, *args)
    module.config._experts_implementation = "moefuse"
    with torch.no_grad():
        got = torch.compile(module, fullgraph=True, backend="aot_eager")(*args)
    assert difference(got, want).worst < 1e-5


def test_transposed_stacks_are_moved_once_and_kept_once() -> None:
    module = make(*MODULES["gpt_oss"])
    args = inputs(3)
    want = eager(module, *args)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ours(module, *args)
    address = module.gate_up_proj.data_ptr()
    assert module.gate_up_proj.transpose(1, 2).is_contiguous()
    assert difference(ours(module, *args), want).worst < 1e-5
    assert module.gate_up_proj.data_ptr() == address, "moved once"
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert difference(eager(module, *args), want).worst < 1e-5, "the stock path still runs"


def test_a_stack_moved_in_inference_mode_can_be_trained() -> None:
    model = tiny_model("gpt_oss")
    model.set_experts_implementation("moefuse")
    tokens = torch.randint(0, 97, (1, 4))
    with torch.inference_mode():
        model(input_ids=tokens)
    model(input_ids=tokens, labels=tokens).loss.backward()
    assert float(model.model.layers[0].mlp.experts.gate_up_proj.grad.abs().sum()) > 0


def test_a_moved_stack_is_saved_as_it_was(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.set_experts_implementation("moefuse")
    with torch.no_grad():
        model(input_ids=torch.randint(0, 97, (1, 3)))
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, experts_implementation="moefuse")
    assert again.config._experts_implementation == "moefuse"
    for name, value in again.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_fp8_experts_are_refused_with_a_way_out() -> None:
    with pytest.raises(NotImplementedError, match=r"Linear: its weights are FP8.*grouped_mm"):
        FP8ExpertsInterface().get_interface("moefuse", None)(nn.Linear(2, 2), None, None, None)


def test_the_list_of_families_is_transformers_own() -> None:
    assert {"mixtral", "qwen3_moe", "gpt_oss", "nemotron_h"} <= set(families())
    assert [type(module).__name__ for _, module in on_interface(tiny_model("mixtral"))] == ["MixtralExperts"] * 2


def test_a_broken_function_fails_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock tests pass on experts that return zeros; ours must not."""
    model = tiny_model("qwen3_moe")
    tokens = torch.randint(0, 97, (2, 7))
    with torch.no_grad():
        want = model(input_ids=tokens).logits.double()
        for fault in (
            lambda _, x, *__: torch.zeros_like(x),
            lambda module, x, ids, weights: experts_forward(module, x, ids.flip(-1), weights),
            lambda module, x, ids, weights: experts_forward(module, x, ids, weights.clone().fill_(1 / 3)),
        ):
            monkeypatch.setitem(ExpertsInterface._global_mapping, "moefuse", fault)
            model.set_experts_implementation("moefuse")
            assert difference(model(input_ids=tokens).logits, want).worst > 1e-3


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def fake_transformers(folder: Path, version: str) -> None:
    meta = folder / f"transformers-{version}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformers\nVersion: {version}\n")


def test_old_transformers_says_what_to_install(tmp_path: Path) -> None:
    fake_transformers(tmp_path, "5.6.2")
    done = run_python("import moefuse.hf", tmp_path)
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert message == (
        "ImportError: moefuse.hf needs transformers 5.7 or newer, and 5.6.2 is installed: "
        + config.install("transformers")
    )


def test_missing_transformers_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import importlib.metadata as m\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "import moefuse.hf"
    )
    done = run_python(code, tmp_path)
    assert done.returncode == 1
    assert f"needs transformers, which is not installed: {config.install('transformers')}" in done.stderr
