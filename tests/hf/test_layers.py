"""Whole decoder layers: norms, residuals and attention in our ops, and every reason to take the old path."""

import copy
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import families, tiny_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from moefuse.hf import attention, layers, patch, unpatch
from moefuse.nn.recognize import NotRecognized

#: families whose attention is ours, too: norms of heads and of rows, sinks, windows, biases, parts of a head rotated
WHOLE = ("qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss", "glm4_moe", "olmoe", "minimax_m2", "granitemoe", "dots1")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a whole layer's attention ran on our ops, and a norm was handed on."""
    counts: Counter[str] = Counter()
    run, taken = layers.attention, layers.Handoff.take

    def attended(*args: object, **kwargs: object) -> object:
        counts["attention"] += 1
        return run(*args, **kwargs)

    def take(self: layers.Handoff, hidden: Tensor, norm: nn.Module) -> Tensor | None:
        found = taken(self, hidden, norm)
        counts["norm"] += found is not None
        return found

    monkeypatch.setattr(layers, "attention", attended)
    monkeypatch.setattr(layers.Handoff, "take", take)
    return counts


def tokens(batch: int = 2, length: int = 6) -> Tensor:
    return torch.randint(0, 97, (batch, length))


def close(got: Tensor, want: Tensor) -> None:
    assert (got - want).norm() <= 2e-5 * want.norm()


@pytest.mark.parametrize("family", [family for family in WHOLE if family in families()])
def test_steps_over_a_growing_cache_are_those_of_the_stock_model(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of each sequence, one of them padded, past the end of a window where there is one."""
    model, steps, attend = tiny_model(family).eval(), Counter[str](), attention.attend

    def counted(*args: Any, **options: Any) -> Tensor:
        steps["attend"] += 1
        return attend(*args, **options)

    monkeypatch.setattr(attention, "attend", counted)
    x, mask = tokens(length=20), torch.ones(2, 20, dtype=torch.long)
    mask[0, :3] = 0

    def run() -> list[Tensor]:
        cache, found = None, []
        for first, last in ((0, 17), (17, 18), (18, 19), (19, 20)):
            given = {"attention_mask": mask[:, :last], "past_key_values": cache, "use_cache": True}
            out = model(input_ids=x[:, first:last], **given)
            cache = out.past_key_values
            found.append(out.logits[:, -1])
        return found

    with torch.no_grad():
        want = run()
        report = patch(model)
        for got, goal in zip(run(), want, strict=True):
            close(got, goal)
    own = model.config.get_text_config()._attn_implementation == "sdpa"
    assert steps["attend"] == (3 * len(report.layers) if own else 0)


@pytest.mark.parametrize("family", [family for family in WHOLE if family in families()])
def test_logits_are_those_of_the_stock_model(family: str, calls: Counter[str]) -> None:
    model = tiny_model(family).eval()
    x, mask = tokens(), torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        want = model(input_ids=x).logits
        padded = model(input_ids=x, attention_mask=mask).logits
        text = model.generate(x, max_new_tokens=12, do_sample=False, pad_token_id=0)
        report = patch(model)
        assert report.layers, report
        assert not report.parts, report
        close(model(input_ids=x).logits, want)
        assert calls == {"attention": len(report.layers), "norm": len(report.layers)}
        close(model(input_ids=x, attention_mask=mask).logits[1], padded[1])
        assert torch.equal(model.generate(x, max_new_tokens=12, do_sample=False, pad_token_id=0), text)
        unpatch(model)
        assert torch.equal(model(input_ids=x).logits, want)


@pytest.mark.parametrize("family", ["deepseek_v3", "hunyuan_v1_moe", "ernie4_5_moe"])
def test_attention_that_is_not_understood_runs_itself_inside_a_whole_layer(family: str, calls: Counter[str]) -> None:
    model = tiny_model(family).eval()
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        report = patch(model)
        assert report.layers
        assert all("attention" in reason for reason in report.parts.values())
        close(model(input_ids=x).logits, want)
    assert calls["attention"] == 0
    assert calls["norm"] >= 1


def test_a_twist_in_attention_is_seen() -> None:
    model = tiny_model("qwen3_moe")
    kind = type(model.model.layers[0].self_attn)

    class Clipped(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: object, **kwargs: object) -> object:
            out, weights = super().forward(*args, **kwargs)
            return out.clamp(-20, 20), weights

    for layer in model.model.layers:
        layer.self_attn.__class__ = Clipped
    with pytest.raises(NotRecognized, match="none of the known rules"):
        attention.attention_of(model.model.layers[0].self_attn)


@pytest.mark.skipif("granitemoe" not in families(), reason="this transformers has it outside the experts interface")
def test_a_twist_in_a_layer_is_seen() -> None:
    model = tiny_model("granitemoe")
    for layer in model.model.layers:
        layer.residual_multiplier = 0.5
    report = patch(model)
    assert not report.layers
    assert "not the sum" in next(iter(report.parts.values())) or "norms" in next(iter(report.parts.values()))


def add_hook_to(path: str) -> Callable[[PreTrainedModel], list[str]]:
    def add(model: PreTrainedModel) -> list[str]:
        seen: list[str] = []
        model.get_submodule(path).register_forward_hook(lambda *_: seen.append(path))
        return seen

    return add


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.q_norm",
        "model.layers.1.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.mlp",
        "model.layers.1.mlp.gate",
    ],
)
def test_a_hook_on_any_part_is_served(path: str) -> None:
    model = tiny_model("qwen3_moe").eval()
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        patch(model)
        seen = add_hook_to(path)(model)
        close(model(input_ids=x).logits, want)
    assert seen == [path]


def test_a_hook_on_the_layer_and_on_the_last_norm_see_what_they_saw() -> None:
    model = tiny_model("qwen3_moe").eval()
    x = tokens()
    seen: list[Tensor] = []
    for path in ("model.layers.0", "model.norm"):
        model.get_submodule(path).register_forward_hook(lambda _module, _args, out: seen.append(out))
    with torch.no_grad():
        model(input_ids=x)
        patch(model)
        model(input_ids=x)
    stock, ours = seen[:2], seen[2:]
    for got, want in zip(ours, stock, strict=True):
        close(got, want)


def test_hidden_states_and_attentions_are_recorded() -> None:
    model = tiny_model("qwen3_moe").eval()
    model.set_attn_implementation("eager")
    x = tokens()
    options = {"output_hidden_states": True, "output_attentions": True, "output_router_logits": True}
    with torch.no_grad():
        want = model(input_ids=x, **options)
        patch(model)
        got = model(input_ids=x, **options)
        alone = model(input_ids=x, output_hidden_states=True)
    for name in ("hidden_states", "attentions", "router_logits"):
        assert len(got[name]) == len(want[name])
        for a, b in zip(got[name], want[name], strict=True):
            close(a, b)
    for a, b in zip(alone.hidden_states, want.hidden_states, strict=True):
        close(a, b)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_stock_model(checkpointing: bool, calls: Counter[str]) -> None:
    model = tiny_model("qwen3_moe").train()
    x = tokens()
    stock = copy.deepcopy(model)
    patch(model)
    if checkpointing:
        model.gradient_checkpointing_enable()
    for each in (model, stock):
        each(input_ids=x, labels=x).loss.backward()
    for (name, got), want in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1e-4 * want.grad.norm() + 1e-7, name
    assert not +calls, "under gradients nothing is handed on, and attention is the module's own"


def test_what_happens_between_layers_is_seen() -> None:
    """A layer that is given another tensor than the last one returned, or the same with other numbers, norms itself."""
    model = tiny_model("qwen3_moe").eval()
    first, second = model.model.layers
    x = torch.randn(1, 5, 64)
    table = model.model.rotary_emb(x, torch.arange(5)[None])
    with torch.no_grad():
        want = second(first(x, position_embeddings=table) * 2, position_embeddings=table)
        patch(model)
        doubled = first(x, position_embeddings=table)
        doubled *= 2
        close(second(doubled, position_embeddings=table), want)
        close(second(first(x, position_embeddings=table) * 2, position_embeddings=table), want)


def test_a_cache_without_layers_grows() -> None:
    model = tiny_model("qwen3_moe").eval()
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        patch(model)
        cache = DynamicCache()
        got = [model(input_ids=part, past_key_values=cache, use_cache=True).logits for part in x.split(2, 1)]
    close(torch.cat(got, 1), want)


def test_a_patched_model_copies_pickles_and_is_patched_once(calls: Counter[str]) -> None:
    model = tiny_model("qwen3_moe").eval()
    x = tokens()
    first = patch(model)
    assert patch(model) == first
    with torch.no_grad():
        want = model(input_ids=x).logits
        calls.clear()
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(input_ids=x).logits, want)
            twin.model.layers[0].input_layernorm.weight.mul_(2)
            assert not torch.equal(twin(input_ids=x).logits, want)
        assert torch.equal(model(input_ids=x).logits, want)
    assert calls["norm"] == calls["attention"] == 5 * len(first.layers)


def test_a_cast_model_still_runs() -> None:
    model = tiny_model("mixtral").eval()
    patch(model)
    x = tokens()
    with torch.no_grad():
        wide = model(input_ids=x).logits
        model.to(torch.bfloat16)
        narrow = model(input_ids=x).logits
        with torch.autocast("cpu", torch.bfloat16):
            model.to(torch.float32)(input_ids=x)
    assert narrow.dtype == torch.bfloat16
    assert (narrow.float() - wide).norm() <= 0.1 * wide.norm()


@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiles(fullgraph: bool) -> None:
    model = tiny_model("mixtral").eval()
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        patch(model)
        compiled = torch.compile(model, fullgraph=fullgraph)
        for _ in range(2):
            close(compiled(input_ids=x).logits, want)
