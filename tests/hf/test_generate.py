"""generate: the same tokens as the stock implementation, also with a static cache and under torch.compile."""

import pytest
import torch
from families import tiny_model
from torch import Tensor

from moefuse.hf import patch, unpatch
from moefuse.hf.text import expert_load

WAYS = ("experts", "patch")


def written(model: torch.nn.Module, prompt: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Tokens and the logits each was taken from."""
    model.generation_config.eos_token_id = None
    out = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def agree(model: torch.nn.Module, way: str, compiled: str | None = None, **options: object) -> bool:
    """Whether a fresh prompt is continued as eager does; a near tie of logits or routers may part the two."""
    prompt = torch.randint(0, 97, (2, 5))
    with torch.no_grad():
        model.set_experts_implementation("eager")
        tokens, logits = written(model, prompt)
        model.set_experts_implementation("moefuse")
        if way == "patch":
            assert len(patch(model).patched) == 2
        if compiled is not None:
            model.forward = torch.compile(model.forward, fullgraph=True, backend=compiled)
        got, got_logits = written(model, prompt, **options)
        vars(model).pop("forward", None)
        unpatch(model)
    return torch.equal(got, tokens) and float((got_logits - logits).abs().max()) < 1e-4 * float(logits.abs().max())


def agree_soon(*args: object, **options: object) -> bool:
    return agree(*args, **options) or all(agree(*args, **options) for _ in range(2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_generates_what_eager_does(family: str, cache: str, way: str) -> None:
    model = tiny_model(family)
    assert agree_soon(model, way, cache_implementation=cache)


@pytest.mark.parametrize("way", WAYS)
def test_compiled_decode_step(way: str) -> None:
    model = tiny_model("qwen2_moe")
    assert agree_soon(model, way, compiled="aot_eager", cache_implementation="static")


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model = tiny_model("qwen2_moe")
    assert agree_soon(model, "patch", compiled="inductor", cache_implementation="static")


def test_expert_load_counts_every_assignment() -> None:
    model = tiny_model("qwen2_moe")
    patch(model)
    load = expert_load(model, torch.randint(0, 97, (1, 11)))
    assert list(load) == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    assert all(counts.shape == (8,) and int(counts.sum()) == 11 * 3 for counts in load.values())
    assert not any(module._forward_pre_hooks for module in model.modules())
