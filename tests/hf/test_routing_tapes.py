"""Tapes of transformers' models: patched, or with our experts alone; taken down by generate, replayed in training."""

from typing import Any

import pytest
import torch
from families import families, tiny_model
from torch import Tensor, nn

import moefuse.hf
from moefuse.hf import moe_module
from moefuse.nn import RoutingTape

KINDS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe"]


def model_of(family: str, patched: bool) -> Any:
    torch.manual_seed(3)
    model: Any = tiny_model(family).eval()
    model.set_experts_implementation("moefuse")
    if patched:
        moefuse.hf.patch(model)
    return model


def tokens(batch: int = 3, length: int = 7) -> Tensor:
    return torch.randint(97, (batch, length))


def recorded(model: nn.Module, *batches: Tensor, **options: Any) -> RoutingTape:
    tape = RoutingTape(**options)
    with tape.record(model), torch.no_grad():
        for batch in batches:
            model(batch)
    return tape


@pytest.mark.parametrize("patched", [False, True], ids=["experts", "patched"])
@pytest.mark.parametrize("family", KINDS)
def test_experts_are_replayed_with_gradients_to_the_router(family: str, patched: bool) -> None:
    """Into a model whose router would choose otherwise: the experts are those of the tape, each of them."""
    assert family in families()
    model, batch = model_of(family, patched), tokens()
    tape = recorded(model, batch)
    with torch.no_grad():
        want = model(batch).logits
    with tape.replay(model), torch.no_grad():
        again = model(batch).logits
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-4)
    routers = [name for name, p in model.named_parameters() if p.dim() == 2 and ("router" in name or "gate." in name)]
    routers = [name for name in routers if "shared" not in name and "proj" not in name]
    assert routers
    with torch.no_grad():
        for name in routers:
            parameter = model.get_parameter(name)
            parameter.add_(torch.randn_like(parameter) * parameter.std())
    fresh = recorded(model, batch)
    assert any(not torch.equal(fresh.ids(name), tape.ids(name)) for name in tape.layers)
    seen = RoutingTape()
    with tape.replay(model):
        spied = _spied(model, seen)
        out = model(batch).logits
        spied()
    assert seen.layers == tape.layers
    for name in tape.layers:
        assert torch.equal(seen.ids(name), tape.ids(name)), "all of them"
    out.float().square().mean().backward()
    for name in routers:
        assert model.get_parameter(name).grad.abs().max() > 0, name
    assert not hasattr(model.get_submodule(tape.layers[0]), "_routing_tape")
    assert ("forward" in vars(model.get_submodule(tape.layers[0]))) == patched


def _replayed(tape: RoutingTape, model: Any, batch: Tensor, **options: Any) -> None:
    with tape.replay(model):
        model(batch, **options)


def _spied(model: Any, seen: RoutingTape) -> Any:
    """Note the ids that reach our experts, by the layer whose tape is in turn."""
    real, names = moe_module.experts, iter(())

    def experts(rows: Tensor, ids: Tensor, *values: Any, **named: Any) -> Any:
        nonlocal names
        name = next(names, None)
        if name is None:
            names = (path for path, module in model.named_modules() if "_moefuse" in vars(module))
            name = next(names)
        E = named["down"].shape[0]
        seen.add(name, ids, E)
        return real(rows, ids, *values, **named)

    moe_module.experts = experts

    def undo() -> None:
        moe_module.experts = real

    return undo


@pytest.mark.parametrize("patched", [False, True], ids=["experts", "patched"])
def test_what_generate_draws_is_learnt_from(patched: bool) -> None:
    """A rollout in steps, captured or not, and a training batch of whole sequences with the same experts."""
    model, prompt = model_of("qwen3_moe", patched), tokens(3, 5)
    moefuse.hf.capture(model, batch=3, max_length=32)
    tape = RoutingTape(weights=True)
    with tape.record(model):
        drawn = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=True, max_new_tokens=6,
                               min_new_tokens=6, pad_token_id=0)  # fmt: skip
    moefuse.hf.uncapture(model)
    assert drawn.shape == (3, 11)
    assert tape.ids(tape.layers[0]).shape[0] == 3 * 10, "the last token went through no layer"
    turned, whole = tape.sequences(3), recorded(model, drawn[:, :-1])
    for name in whole.layers:
        assert torch.equal(turned.ids(name), whole.ids(name))
    model.train()
    with turned.replay(model):
        loss = model(drawn[:, :-1]).logits.float().logsumexp(-1).mean()
        loss.backward()
    with turned.replay(model, weights=True), torch.no_grad():
        torch.testing.assert_close(model(drawn[:, :-1]).logits.float().logsumexp(-1).mean(), loss, rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing() -> None:
    model, batch = model_of("qwen3_moe", True), tokens()
    tape = recorded(model, batch)
    model.train()
    grads = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        with tape.replay(model):
            model(batch).logits.float().square().mean().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-7)


def test_a_router_that_is_not_understood_needs_its_weights() -> None:
    model, batch = model_of("qwen3_moe", False), tokens()
    for block in model.modules():
        if type(block).__name__ == "Qwen3MoeSparseMoeBlock":
            block.forward = type(block).forward.__get__(block)  # wrapped, as by who knows whom
    tape = recorded(model, batch, weights=True)
    with torch.no_grad():
        want = model(batch).logits
    with pytest.raises(ValueError, match="must be understood to weigh replayed experts, got Qwen3MoeSparseMoeBlock"):
        _replayed(tape, model, batch)
    with tape.replay(model, weights=True), torch.no_grad():
        assert torch.equal(model(batch).logits, want)


def test_a_call_that_looks_at_the_parts_needs_weights() -> None:
    model, batch = model_of("qwen3_moe", True), tokens()
    tape = recorded(model, batch)
    with pytest.raises(ValueError, match="must run as a whole to weigh replayed experts"), tape.replay(model):
        model(batch, output_router_logits=True)
    assert model(batch).logits.isfinite().all()


def test_models_that_do_not_run_on_us_are_refused() -> None:
    model: Any = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    with pytest.raises(ValueError, match="experts of transformers that run on moefuse"), RoutingTape().record(model):
        pass


def test_tapes_go_from_one_model_to_another() -> None:
    """Taken down by our experts in transformers' block, replayed by the patched model."""
    first, second, batch = model_of("qwen3_moe", False), model_of("qwen3_moe", True), tokens()
    tape = recorded(first, batch)
    with torch.no_grad():
        want = first(batch).logits
        with tape.replay(nn.Sequential(second)):
            torch.testing.assert_close(second(batch).logits, want, rtol=1e-4, atol=1e-4)
    other = model_of("deepseek_v3", True)
    with pytest.raises(ValueError, match="must have the 2 layers of the tape, got 1"), tape.replay(other):
        pass
