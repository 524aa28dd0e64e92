"""patch: whole MoE layers, everything else as it was."""

import copy
import io

import pytest
import torch
from families import tiny_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import moefuse.hf
from moefuse.hf import moe_module, patch, unpatch
from moefuse.nn.recognize import mlp_of, rule_of
from moefuse.testing.compare import difference


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each call of a whole layer."""
    calls: list[str] = []
    run = moe_module.run

    def counted(*args: object, **kwargs: object) -> object:
        calls.append("run")
        return run(*args, **kwargs)

    monkeypatch.setattr(moe_module, "run", counted)
    return calls


def tokens() -> Tensor:
    return torch.randint(0, 97, (2, 6))


def test_report_counts_and_explains(fused_calls: list[str]) -> None:
    model = tiny_model("qwen2_moe")
    report = patch(model)
    assert report.patched == ("model.layers.0.mlp", "model.layers.1.mlp")
    assert str(report) == "2 of 2 blocks patched, 2 with the layer around them"
    with torch.no_grad():
        model(input_ids=tokens())
    assert len(fused_calls) == 2
    left = patch(tiny_model("phimoe"))
    assert not left.patched
    assert "PhimoeSparseMoeBlock: its router follows none of the known rules" in str(left)


def test_a_dense_model_has_no_layer_to_patch_and_the_report_says_why() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    report = patch(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=50)))
    assert str(report) == "no block patched: the model has no experts that transformers' experts interface reaches"


def test_layers_left_alone_still_get_our_experts() -> None:
    model = tiny_model("phimoe")
    patch(model)
    assert model.config._experts_implementation == "moefuse"


def test_state_dict_and_classes_stay() -> None:
    model = tiny_model("qwen2_moe")
    before, kinds = model.state_dict(), [type(module) for module in model.modules()]
    patch(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].data_ptr() == before[name].data_ptr() for name in before)
    assert [type(module) for module in model.modules()] == kinds


def test_twice_is_once_and_unpatch_restores() -> None:
    model = tiny_model("deepseek_v3")
    model.set_experts_implementation("eager")
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        assert patch(model).patched == patch(model).patched
        unpatch(model)
        unpatch(model)
        assert torch.equal(model(input_ids=x).logits, want)
    assert model.config._experts_implementation == "eager"
    assert not any("forward" in vars(module) or "_moefuse" in vars(module) for module in model.modules())


def test_layers_alike_are_looked_into_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[nn.Module] = []
    real = moe_module.rule_of

    def counted(layer: nn.Module, *args: object) -> object:
        looked.append(layer)
        return real(layer, *args)

    monkeypatch.setattr(moe_module, "rule_of", counted)
    assert len(patch(tiny_model("qwen2_moe")).patched) == 2
    assert len(looked) == 1
    report = patch(tiny_model("phimoe"))
    assert len(report.left_alone) == 2, "what is not understood is not looked into again either"
    assert len(looked) == 2


def test_layers_that_differ_are_told_apart() -> None:
    def change_attribute(layer: nn.Module) -> None:
        layer.gate.norm_topk_prob = not layer.gate.norm_topk_prob

    def change_class(layer: nn.Module) -> None:
        layer.__class__ = type("TwistedBlock", (Twisted, type(layer)), {})

    for change, count in ((change_attribute, 2), (change_class, 1)):
        model = tiny_model("qwen3_moe")
        change(model.model.layers[1].mlp)
        model.set_experts_implementation("eager")
        x = tokens()
        with torch.no_grad():
            want = model(input_ids=x).logits.double()
            assert len(patch(model).patched) == count
            assert difference(model(input_ids=x).logits, want).worst < 1e-5


def test_new_weights_are_seen() -> None:
    model = tiny_model("qwen2_moe")
    patch(model)
    other = tiny_model("qwen2_moe")
    other.set_experts_implementation("eager")
    model.load_state_dict(other.state_dict())
    x = tokens()
    with torch.no_grad():
        assert difference(model(input_ids=x).logits, other(input_ids=x).logits.double()).worst < 1e-5


def test_router_logits_are_recorded(fused_calls: list[str]) -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("eager")
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x, output_router_logits=True)
        patch(model)
        got = model(input_ids=x, output_router_logits=True)
        assert not fused_calls, "the routers must run for their logits to be recorded"
        assert len(got.router_logits) == len(want.router_logits) == 2
        for ours, theirs in zip(got.router_logits, want.router_logits, strict=True):
            assert difference(ours, theirs.double()).worst < 1e-5
        assert torch.allclose(got.aux_loss, want.aux_loss, rtol=1e-4)
        hidden = model(input_ids=x, output_hidden_states=True)
        assert len(fused_calls) == 2, "hidden states are recorded elsewhere"
        assert len(hidden.hidden_states) == 3


def test_weights_that_a_layer_returns_come_with_the_result(fused_calls: list[str]) -> None:
    model = tiny_model("gpt_oss")
    model.set_experts_implementation("eager")
    layer = model.model.layers[0].mlp
    x = torch.randn(1, 5, model.config.hidden_size)
    with torch.no_grad():
        want = layer(x)
        assert len(patch(model).patched) == 2
        got = layer(x)
    assert not fused_calls, "a single call keeps the weights to itself"
    for ours, theirs in zip(got, want, strict=True):
        assert difference(ours, theirs.double()).worst < 1e-5


def test_a_hook_on_a_part_is_served(fused_calls: list[str]) -> None:
    model = tiny_model("qwen2_moe")
    patch(model)
    seen = []
    handle = model.model.layers[0].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        model(input_ids=tokens())
        assert len(seen) == 1
        assert len(fused_calls) == 1, "the other layer is still whole"
        handle.remove()
        model(input_ids=tokens())
    assert len(fused_calls) == 3


def test_a_part_put_in_later_is_served(fused_calls: list[str]) -> None:
    model = tiny_model("qwen2_moe")
    patch(model)
    shared = model.model.layers[0].mlp.shared_expert

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    x = tokens()
    with torch.no_grad():
        before = model(input_ids=x).logits
        adapter = Doubled(shared.down_proj.in_features, shared.down_proj.out_features, bias=False)
        adapter.weight = shared.down_proj.weight
        shared.down_proj = adapter
        del fused_calls[:]
        assert not torch.equal(model(input_ids=x).logits, before)
    assert len(fused_calls) == 1, "the other layer is still whole"


def test_offloaded_weights_are_fetched() -> None:
    accelerate = pytest.importorskip("accelerate")
    for order in ("before", "after"):
        model = tiny_model("qwen2_moe")
        model.set_experts_implementation("eager")
        x = tokens()
        with torch.no_grad():
            want = model(input_ids=x).logits.double()
            if order == "after":
                assert patch(model).patched
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            if order == "before":
                assert "wrapped" in next(iter(patch(model).left_alone.values()))
            assert difference(model(input_ids=x).logits, want).worst < 1e-5, order


def test_gradient_checkpointing() -> None:
    model = tiny_model("qwen2_moe").train()
    x = tokens()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=x, labels=x).loss.backward()
        return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}

    patch(model)
    want = gradients()
    model.gradient_checkpointing_enable()
    got = gradients()
    for name, value in want.items():
        assert difference(got[name], value.double(), whole=True).worst < 1e-5, name


def test_training_noise_keeps_the_old_path(fused_calls: list[str]) -> None:
    model = tiny_model("mixtral")
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.1
    assert len(patch(model).patched) == 2
    with torch.no_grad():
        model.train()(input_ids=tokens())
        assert not fused_calls
        model.eval()(input_ids=tokens())
    assert len(fused_calls) == 2


def test_pickles_and_copies() -> None:
    model = tiny_model("qwen3_moe")
    patch(model)
    x = tokens()
    with torch.no_grad():
        want = model(input_ids=x).logits
        clone = copy.deepcopy(model)
        assert torch.equal(clone(input_ids=x).logits, want)
        with torch.no_grad():
            clone.model.layers[0].mlp.experts.down_proj.zero_()
        assert not torch.equal(clone(input_ids=x).logits, want), "the copy runs on its own weights"
        assert torch.equal(model(input_ids=x).logits, want)
        stored = io.BytesIO()
        torch.save(model, stored)
        stored.seek(0)
        assert torch.equal(torch.load(stored, weights_only=False)(input_ids=x).logits, want)


def test_bfloat16_layer_is_as_near_to_the_truth_as_stock() -> None:
    model = tiny_model("qwen2_moe")
    layer = model.model.layers[0].mlp
    model.set_experts_implementation("eager")
    x = torch.randn(1, 201, 64).bfloat16()

    def typical_error(got: Tensor, want: Tensor) -> float:
        """Of the median token: in bfloat16 a few stand between two experts and may take either."""
        gap, size = ((t.double().square().mean(-1).sqrt()) for t in (got.double() - want, want))
        return float((gap / size).median())

    with torch.no_grad():
        model.bfloat16()
        truth = copy.deepcopy(layer).double()(x.double())
        stock = typical_error(layer(x), truth)
        patch(model)
        assert typical_error(layer(x), truth) < 1.2 * stock


def test_not_a_model() -> None:
    with pytest.raises(TypeError, match="patch: model must be a torch module, got dict"):
        patch({})


def moe_layer(family: str) -> nn.Module:
    model: PreTrainedModel = tiny_model(family)
    path = next(path for path, _ in moefuse.hf.support.on_interface(model))
    return model.get_submodule(path.rpartition(".")[0])


def test_rules_are_read_off_behaviour() -> None:
    rule = rule_of(moe_layer("deepseek_v3"))
    assert (rule.routing.score, rule.routing.groups, rule.routing.top_groups) == ("sigmoid", 4, 2)
    assert rule.routing.scale == 2.5
    assert rule.selection_bias == "gate.e_score_correction_bias"
    rule = rule_of(moe_layer("gpt_oss"))
    assert (rule.routing.score, rule.logit_bias, rule.returns_weights) == ("softmax", "router.bias", True)
    rule = rule_of(moe_layer("qwen2_moe"))
    assert (rule.shared, rule.shared_gate) == ("shared_expert", "shared_expert_gate")


def test_rules_need_no_weights() -> None:
    layer = moe_layer("deepseek_v3")
    assert rule_of(copy.deepcopy(layer).to("meta")) == rule_of(layer)


def test_a_clamp_in_the_shared_expert_is_noticed() -> None:
    shared = moe_layer("deepseek_v3").shared_experts
    assert mlp_of(shared).kind == "silu"

    class Clamped(type(shared)):
        def forward(self, x: Tensor) -> Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=50)) * self.up_proj(x))

    shared.__class__ = Clamped
    assert mlp_of(shared) is None


class Twisted(nn.Module):
    """A layer that looks like its parent and does a little more."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) + 1e-3 * hidden_states


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_a_small_twist_is_left_alone(family: str) -> None:
    model = tiny_model(family)
    for path, _ in list(moefuse.hf.support.on_interface(model)):
        layer = model.get_submodule(path.rpartition(".")[0])
        layer.__class__ = type("TwistedBlock", (Twisted, type(layer)), {})
    report = patch(model)
    assert not report.patched
    assert all("not the sum" in reason for reason in report.left_alone.values())
