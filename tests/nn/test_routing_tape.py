"""Routing that was taken down is replayed: the same experts, gradients to the router, and errors in words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import moefuse
from moefuse import Routing
from moefuse.nn import MoE, RouterTraining, RoutingTape, add_lora

ROUTINGS = {
    "softmax": Routing(top_k=3),
    "plain softmax": Routing(top_k=2, renormalize=False),
    "sigmoid": Routing(top_k=4, score="sigmoid", scale=2.5, groups=4, top_groups=2, group_score="top2_sum"),
    "sqrtsoftplus": Routing(top_k=2, score="sqrtsoftplus"),
    "softcap": Routing(top_k=2, softcap=3.0, renormalize_after_scale=True),
}
E, H = 16, 48


class Model(nn.Module):
    """Two layers, one behind the other."""

    def __init__(self, routing: Routing = ROUTINGS["softmax"], checkpoints: bool = False, **on: Any) -> None:
        super().__init__()
        options = {"norm": True, "selection_bias": True, "per_expert_scale": True, "logit_bias": True} | on
        self.layers = nn.ModuleList(MoE(H, 32, E, routing, **options) for _ in range(2))
        self.checkpoints = checkpoints
        for layer in self.layers:
            nn.init.normal_(layer.logit_bias, std=0.3)
            nn.init.uniform_(layer.per_expert_scale, 0.5, 1.5)
            layer.selection_bias.normal_(std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, x, use_reentrant=False) if self.checkpoints else layer(x, x)
        return x


def recorded(model: nn.Module, *batches: Tensor, weights: bool = False) -> RoutingTape:
    tape = RoutingTape(weights=weights)
    with tape.record(model), torch.no_grad():
        for x in batches:
            model(x)
    return tape


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return {"x": x.grad} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_a_replay_changes_no_bit(routing: Routing) -> None:
    """However the tokens are cut into calls; results and gradients."""
    model, x = Model(routing), torch.randn(23, H)
    want, grads = model(x), gradients(model, x)
    tape = recorded(model, x[:7], x[7:8], x[8:])
    assert tape.layers == ("layers.0", "layers.1")
    with tape.replay(model):
        got = model(x)
    assert torch.equal(got, want)
    with tape.replay(model):
        again = gradients(model, x)
    assert again.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(again[name], grad), name


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_other_experts_than_the_routers_are_weighed_by_its_scores(routing: Routing) -> None:
    """Against the formula in float64, with the gradient of the router through the replayed ids."""
    layer, x = MoE(H, 32, E, routing, norm=True), torch.randn(11, H)
    ids = torch.rand(11, E).argsort(-1)[:, : routing.top_k]
    ids[3, 0] = E  # no expert
    tape = RoutingTape()
    tape.add("", ids, E)
    with tape.replay(layer):
        got = layer(x)
        (d_router,) = torch.autograd.grad(got.square().sum(), [layer.router])
    wide = layer.router.detach().double().requires_grad_()
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + layer.eps)
    normed = normed * layer.norm_weight.double()
    logits = normed @ wide.T
    if routing.softcap:
        logits = routing.softcap * torch.tanh(logits / routing.softcap)
    scores: dict[str, Callable[[Tensor], Tensor]] = {
        "softmax": lambda z: z.softmax(-1),
        "sigmoid": torch.sigmoid,
        "sqrtsoftplus": lambda z: nn.functional.softplus(z).sqrt(),
    }
    live = ids < E
    chosen = scores[routing.score](logits).gather(1, ids.clamp(max=E - 1)) * live
    if routing.renormalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    chosen = chosen * routing.scale
    if routing.renormalize_after_scale:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    out = moefuse.experts(normed, ids, chosen, layer.gate_up.double(), layer.down.double(), backend="reference")
    torch.testing.assert_close(got.double(), out, rtol=2e-5, atol=2e-5)
    (want,) = torch.autograd.grad(out.square().sum(), [wide])
    assert want.abs().max() > 0
    torch.testing.assert_close(d_router.double(), want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_weights_are_replayed_where_that_is_asked_for() -> None:
    model, other, x = Model(), Model(), torch.randn(9, H)
    tape = recorded(model, x, weights=True)
    with tape.replay(other, weights=True):
        other.layers[0](x)
        out = other.layers[1](x)
        assert out.requires_grad
        (unused,) = torch.autograd.grad(out.sum(), [other.layers[1].router], allow_unused=True)
        assert unused is None or not unused.any(), "fixed weights have no gradient"
    assert torch.equal(tape.weights("layers.0").sum(-1) > 0, torch.ones(9, dtype=torch.bool))
    with (
        pytest.raises(ValueError, match="weights must have been taken down"),
        recorded(model, x).replay(model, weights=True),
    ):
        pass


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_run_a_call_again_with_its_own_experts(reentrant: bool) -> None:
    model, x = Model(), torch.randn(12, H)
    tape = recorded(model, x)
    with tape.replay(model):
        want = gradients(model, x)
    model.checkpoints = True
    if reentrant:
        model.forward = lambda x: checkpoint(  # type: ignore[method-assign]
            model.layers[1], checkpoint(model.layers[0], x, x, use_reentrant=True), use_reentrant=True
        )
        with tape.replay(model):
            assert gradients(model, x)["x"].isfinite().all()
        return
    with tape.replay(model):
        got = gradients(model, x)
    for name, grad in want.items():
        assert torch.equal(got[name], grad), name


def test_a_second_recording_ignores_what_checkpoints_run_again() -> None:
    model, x = Model(checkpoints=True), torch.randn(6, H)
    tape = RoutingTape()
    with tape.record(model):
        gradients(model, x)
    assert [tape.ids(name).shape[0] for name in tape.layers] == [6, 6]


def test_training_and_adapters_follow_the_tape() -> None:
    """A router's losses, statistics and LoRA come between router and experts."""
    model, x = Model(router_training=RouterTraining(balance_loss=0.1)), torch.randn(15, H)
    tape = recorded(model, x)
    for layer in model.layers:
        add_lora(layer, rank=2)
        layer.router.requires_grad_()
    with tape.replay(model):
        out = model(x)
        out.sum().backward()
    assert model.layers[0].router.grad.abs().max() > 0
    assert torch.equal(model.layers[1].auxiliary_loss.isfinite(), torch.tensor(True))


def test_a_tape_survives_its_file(tmp_path: Path) -> None:
    model = Model()
    for weights in (False, True):
        tape = recorded(model, torch.randn(5, H), torch.randn(3, H), weights=weights)
        path = tmp_path / f"tape.{weights}"
        tape.save(path)
        loaded = RoutingTape.load(path)
        assert loaded == tape
        assert str(loaded) == str(tape)
        assert "top-3 of 16 experts" in str(tape)
    assert tape != recorded(model, torch.randn(8, H), weights=True)
    assert RoutingTape() == RoutingTape()
    assert str(RoutingTape()) == "RoutingTape(empty)"


def test_ids_take_a_byte_or_two(tmp_path: Path) -> None:
    for experts, size in ((255, 1), (256, 2), (1024, 2)):
        tape = RoutingTape()
        ids = torch.randint(experts, (4000, 8))
        ids[5, 2], ids[6, 3] = -1, experts + 4
        tape.add("layer", ids, experts)
        assert torch.equal(tape.ids("layer"), torch.where((ids < 0) | (ids >= experts), experts, ids).int())
        tape.save(tmp_path / "tape")
        assert (tmp_path / "tape").stat().st_size < 4000 * 8 * size + 2000
    whole = RoutingTape()
    whole.add("layer", torch.randint(256, (4000, 8)), 256)
    whole.save(tmp_path / "tape")
    assert (tmp_path / "tape").stat().st_size < 4000 * 8 + 2000, "no id is over 255"
    assert RoutingTape.load(tmp_path / "tape") == whole


def test_files_that_are_no_tape_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tape"
    tape = recorded(Model(), torch.randn(5, H))
    tape.save(path)
    whole = path.read_bytes()
    pickled = tmp_path / "pickled"
    with pickled.open("wb") as file:
        numpy.savez(file, about=numpy.array([{"a": 1}], dtype=object))
    changed = {
        b"moefuse routing tape": b"moefuse_routing_tape",
        b'"lengths": [5]': b'"lengths": [6]',
        b"ids_1": b"ids_7",
        b'"num_experts": 16': b'"num_experts": -6',
    }
    bad = [b"", b"not a tape", whole[: len(whole) // 2], pickled.read_bytes()]
    bad += [whole.replace(old, new) for old, new in changed.items()]
    for number, content in enumerate(bad):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is no tape"):
            print(number, RoutingTape.load(path))
    with pytest.raises(FileNotFoundError):
        RoutingTape.load(tmp_path / "none")


def test_what_does_not_fit_is_refused_by_name() -> None:
    model, x = Model(), torch.randn(9, H)
    tape = recorded(model, x)

    def replayed(other: Any, *batches: Tensor) -> None:
        with tape.replay(other):
            for batch in batches:
                other(batch)

    with pytest.raises(ValueError, match=r"layers\.0 must be given the 9 tokens of the tape, got 10"):
        replayed(model, x, x[:1])
    with pytest.raises(ValueError, match=r"layers\.0 must be given the 9 tokens of the tape, got 4"):
        replayed(model, x[:4])
    assert all(layer._routing_tape is None for layer in model.layers), "a tape is taken out, whatever happens"
    with pytest.raises(ValueError, match=r"must have top-3 of 16 experts as on the tape, got top-2 of 16"):
        replayed(Model(Routing(top_k=2)), x)
    with pytest.raises(ValueError, match="must have the 2 layers of the tape, got 1"):
        replayed(MoE(H, 8, E, ROUTINGS["softmax"]), x)
    bigger = Model()
    bigger.layers.append(MoE(H, 8, E, ROUTINGS["softmax"]))
    with pytest.raises(ValueError, match="must have the 2 layers of the tape, got 3; the tape lacks 2"):
        replayed(bigger, x)
    with pytest.raises(ValueError, match=r"must have a moefuse\.nn\.MoE"):
        replayed(nn.Linear(3, 3), x)
    with pytest.raises(TypeError, match="model must be a torch module, got str"):
        replayed("model", x)
    with pytest.raises(ValueError, match="got an empty one"), RoutingTape().replay(model):
        pass
    with pytest.raises(ValueError, match="one tape must be at work"), tape.record(model), RoutingTape().record(model):
        pass
    with pytest.raises(ValueError, match=r"layer must be one of layers\.0, layers\.1, got 'x'"):
        tape.ids("x")
    with pytest.raises(ValueError, match="made with weights=True, got one without"):
        tape.weights("layers.0")
    for wrong in (torch.zeros(3), torch.zeros(3, 2), torch.zeros(3, 0, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"ids must be integers \[T, top_k\]"):
            tape.add("layers.0", wrong, E)
    with pytest.raises(ValueError, match="must have top-3 of 16 experts as on the tape, got top-2 of 16 experts"):
        tape.add("layers.0", torch.zeros(3, 2, dtype=torch.int64), E)
    with pytest.raises(ValueError, match="must be given no weights"):
        tape.add("layers.0", torch.zeros(3, 3, dtype=torch.int64), E, torch.zeros(3, 3))
    with pytest.raises(TypeError, match="weights must be a bool"):
        RoutingTape(weights="yes")  # type: ignore[arg-type]


def test_a_model_that_another_wraps_has_the_same_layers() -> None:
    model, x = Model(), torch.randn(9, H)
    tape, want = recorded(nn.Sequential(model), x), model(x)
    assert tape.layers == ("0.layers.0", "0.layers.1")
    with tape.replay(model):
        assert torch.equal(model(x), want)


def test_steps_become_sequences() -> None:
    """What generate does in steps, a training batch has as one."""
    model, tokens = Model(), torch.randn(3, 7, H)
    tape = recorded(model, tokens[:, :4], tokens[:, 4:5], tokens[:, 5:6], tokens[:, 6:])
    whole = recorded(model, tokens)
    turned = tape.sequences(3)
    assert tape != whole
    assert turned == whole
    with turned.replay(model):
        assert torch.equal(model(tokens), model_alone(model, tokens))
    with pytest.raises(ValueError, match="every call must have tokens of 2 sequences, got 3"):
        tape.sequences(2)


def model_alone(model: nn.Module, tokens: Tensor) -> Tensor:
    return Model.forward(_detached(model), tokens)


def _detached(model: nn.Module) -> Any:
    """The same layers without their tapes."""
    import copy

    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer._routing_tape = None
    return plain


def test_a_compiled_model_is_taped_and_replayed() -> None:
    model, x = Model(), torch.randn(9, H)
    compiled = torch.compile(model, backend="eager")
    want = compiled(x)
    tape = recorded(compiled, x)
    assert tape == RoutingTape() or tape.ids(tape.layers[0]).shape == (9, 3)
    with tape.replay(compiled), torch.no_grad():
        assert torch.equal(compiled(x), want)
