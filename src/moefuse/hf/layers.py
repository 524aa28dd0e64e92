"""Whole decoder layers: attention on our ops, and the norms and residuals around it in the launches of the MoE module.

A layer hands the norm of its result to the layer that follows. That one takes it where it is given the very tensor that
the norm was made of, and norms what it is given otherwise: whatever lies between two layers, the result is the same.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from moefuse.hf import moe_module
from moefuse.hf.attention import AttentionRule, attention, attention_of, eps_in, takes
from moefuse.hf.moe_module import Part, are_bare, may_fuse, recorded, watched
from moefuse.nn.recognize import NotRecognized, hollow, once, probing, random_weight, same, structure_of

#: of what transformers records in a forward, what a whole layer still shows
_SHOWN = {"hidden_states", "_hidden_states_layers"}


class Handoff:
    """The last layer's result and its norm, on the way to the layer that follows; shared by the layers of a model."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, int | None, nn.Module, Tensor] | None = None

    def put(self, hidden: Tensor, norm: nn.Module, normed: Tensor) -> None:
        self.held = hidden, _version(hidden), norm, normed

    def take(self, hidden: Tensor, norm: nn.Module) -> Tensor | None:
        """What ``norm`` makes of ``hidden``, where that is here and still true. One of several threads finds it."""
        held, self.held = self.held, None
        if held is None:
            return None
        tensor, version, of, normed = held
        return normed if tensor is hidden and of is norm and version == _version(hidden) else None


def _version(t: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or t.is_inference() else t._version


@dataclass(frozen=True)
class Whole:
    """What a whole layer needs.

    Attributes:
        attention: the name of its attention.
        rule: what that computes; None where the module runs itself.
        before, after: its norms, before attention and before the MoE module, each with its eps.
        moe: the name of its MoE module.
        parts: every module that the whole call leaves out, besides those of the MoE module itself.
        following: the norm that its result goes to, where that looks for it.
    """

    attention: str
    rule: AttentionRule | None
    before: tuple[nn.Module, float]
    after: tuple[nn.Module, float]
    moe: str
    parts: tuple[Part, ...]
    following: tuple[nn.Module, float] | None
    handoff: Handoff


def eps_of(norm: nn.Module) -> float:
    """The eps of an RMSNorm ``weight * x / sqrt(mean(x^2) + eps)``; raises `NotRecognized` for any other module."""
    weight = norm._parameters.get("weight")
    eps = eps_in(norm)
    if weight is None or weight.dim() != 1 or len(list(norm.parameters())) != 1 or len(eps) != 1:
        raise NotRecognized(f"its norm must have one weight and an eps, got {type(norm).__name__}")
    generator = torch.Generator().manual_seed(0)
    probe = hollow(norm)
    probe._parameters["weight"] = random = random_weight(generator, *weight.shape)
    x = torch.randn(4, *weight.shape, generator=generator) * torch.tensor([1e-3, 0.1, 1.0, 100.0])[:, None]
    with torch.no_grad():
        if not same(probe(x), rms_norm(x, weight.shape, random, eps[0])):
            raise NotRecognized(f"its norm must be a plain RMSNorm, got {type(norm).__name__}")
    return float(eps[0])


class _Stand(nn.Module):
    """Stands in for a part of a layer: keeps what it is given, and answers with known rows."""

    def __init__(self, like: nn.Module, answer: Tensor, pair: bool) -> None:
        super().__init__()
        self.answer, self.pair, self.calls = answer, pair, list[Tensor]()
        for name, value in vars(like).items():
            if not name.startswith("_") and name not in ("training", "forward"):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        self.calls.append(hidden_states)
        return (self.answer, None) if self.pair else self.answer


@probing()
def _names_of(layer: nn.Module, moe: str, returns_weights: bool) -> tuple[str, str, str]:
    """The names of a layer's attention and of its norms before and after it; proven by running a copy."""
    children = dict(layer.named_children())
    norms = {
        name: child for name, child in children.items() if set(child._parameters) == {"weight"} and _is_leaf(child)
    }
    others = [name for name, child in children.items() if name not in norms and any(True for _ in child.parameters())]
    if len(norms) != 2 or len(others) != 2 or moe not in others or any(True for _ in layer.parameters(recurse=False)):
        raise NotRecognized(f"it must have attention, a MoE module and two norms, got {', '.join(children)}")
    (attention_name,) = (name for name in others if name != moe)
    for norm in norms.values():
        eps_of(norm)
    shapes = {tuple(norm._parameters["weight"].shape) for norm in norms.values()}  # type: ignore[union-attr]
    ((H,),) = shapes
    generator = torch.Generator().manual_seed(0)
    x, a, m = (torch.randn(2, 3, H, generator=generator) for _ in range(3))
    probe: Any = hollow(layer).eval()
    attended = probe._modules[attention_name] = _Stand(children[attention_name], a, pair=True)
    mixed = probe._modules[moe] = _Stand(children[moe], m, pair=returns_weights)
    for name in norms:
        probe._modules[name]._parameters["weight"] = random_weight(generator, H)
    places = torch.arange(3).expand(2, 3)
    table = torch.ones(2, 3, 4), torch.zeros(2, 3, 4)
    try:
        with torch.no_grad():
            got = probe(x, attention_mask=None, position_ids=places, past_key_values=None, position_embeddings=table)
    except Exception as error:  # it wants what we do not know of
        raise NotRecognized(f"it does not run on a hidden state and a rotary table: {type(error).__name__}") from error
    if not isinstance(got, Tensor) or len(attended.calls) != 1 or len(mixed.calls) != 1:
        raise NotRecognized("it must call attention and the MoE module once, and return one tensor")
    for before, after in itertools.permutations(norms):
        first, second = probe.get_submodule(before), probe.get_submodule(after)
        with torch.no_grad():
            if same(attended.calls[0], first(x)) and same(mixed.calls[0].view(x.shape), second(x + a), of_row=1):
                break
    else:
        raise NotRecognized("its norms do not stand before attention and before the MoE module")
    if not same(got, x + a + m, of_row=1):
        raise NotRecognized("its result is not the sum of its input, attention and the MoE module")
    return attention_name, before, after


def _is_leaf(module: nn.Module) -> bool:
    return not module._modules and not module._buffers


def _understand(layer: nn.Module, name: str) -> tuple[tuple[str, str, str], AttentionRule | NotRecognized]:
    """The names of a layer's parts, and the rule of its attention or why that is not understood."""
    fused: Any = layer.get_submodule(name)._moefuse
    names = _names_of(layer, name, fused.rule.returns_weights)
    try:
        return names, attention_of(layer.get_submodule(names[0]))
    except NotRecognized as reason:
        return names, reason


def _parts_of(layer: nn.Module, names: tuple[str, ...], with_children: bool) -> tuple[Part, ...]:
    parts = []
    for name in names:
        child = layer.get_submodule(name)
        parts.append((layer, name, child))
        if with_children:
            parts += [(child, path, part) for path, part in child.named_children()]
    return tuple(parts)


def take(model: nn.Module, moe_paths: list[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Run the layers around these patched MoE modules as wholes, where they are understood.

    Returns the paths of those layers; and for others, and for attention that goes on to run itself, the reason.
    """
    seen: dict[Any, Any] = {}
    found: dict[str, tuple[str, tuple[str, str, str], AttentionRule | None]] = {}
    taken: list[str] = []
    reasons: dict[str, str] = {}
    for moe_path in moe_paths:
        path, _, name = moe_path.rpartition(".")
        layer = model.get_submodule(path)
        if "_moefuse_layer" in vars(layer):
            taken.append(path)
            continue
        try:
            structure = name, structure_of(layer)
            names, rule = once(seen, structure, functools.partial(_understand, layer, name))
        except NotRecognized as reason:
            reasons[path] = f"{type(layer).__name__}: {reason}"
            continue
        attention_name, *norms = names
        if isinstance(rule, NotRecognized):
            reasons[f"{path}.{attention_name}"] = f"{type(layer.get_submodule(attention_name)).__name__}: {rule}"
            rule = None
        parts = _parts_of(layer, (*norms, name), False) + _parts_of(layer, (attention_name,), True)
        if "forward" in vars(layer) or not are_bare(tuple(part for part in parts if part[1] != name)):
            reasons[path] = f"{type(layer).__name__}: it is wrapped: hooks, offloading or parallelism"
            continue
        found[path] = name, names, rule
    handoff = Handoff()
    for path, (name, (attention_name, before, after), rule) in found.items():
        layer = model.get_submodule(path)
        first, second = layer.get_submodule(before), layer.get_submodule(after)
        parts = _parts_of(layer, (before, after), False) + _parts_of(layer, (attention_name,), rule is not None)
        following = _following(model, path, found, handoff)
        layer._moefuse_layer = Whole(  # type: ignore[assignment]  # torch takes it for a tensor or a module
            attention_name, rule, (first, eps_of(first)), (second, eps_of(second)), name, parts, following, handoff
        )
        layer.forward = functools.partial(forward, layer)
    return (*taken, *found), reasons


def _following(model: nn.Module, path: str, found: dict[str, Any], handoff: Handoff) -> tuple[nn.Module, float] | None:
    """The norm that the result of a layer goes to: the next layer's first; behind the last layer, the model's own."""
    list_path, _, number = path.rpartition(".")
    layers = model.get_submodule(list_path)
    if not isinstance(layers, nn.ModuleList):
        return None
    following = f"{list_path}.{int(number) + 1}"
    if following in found:
        _, (_, before, _), _ = found[following]
        norm = model.get_submodule(following).get_submodule(before)
        return norm, eps_of(norm)
    if int(number) + 1 != len(layers):
        return None
    owner = model.get_submodule(list_path.rpartition(".")[0])
    norms = [child for name, child in owner.named_children() if "norm" in name and _is_leaf(child)]
    if len(norms) != 1 or "forward" in vars(norms[0]):
        return None
    (last,) = norms
    try:
        eps = eps_of(last)
    except NotRecognized:
        return None
    last._moefuse_layer = handoff  # type: ignore[assignment]  # torch takes it for a tensor or a module
    last.forward = functools.partial(_last_norm, last)
    return last, eps


def release(module: nn.Module) -> None:
    """Undo `take` for one module."""
    if "_moefuse_layer" in vars(module):
        del module._moefuse_layer, module.forward


def _last_norm(norm: Any, hidden_states: Tensor) -> Tensor:
    held = norm._moefuse_layer.take(hidden_states, norm)
    return type(norm).forward(norm, hidden_states) if held is None else held  # type: ignore[no-any-return]


def forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """What a whole layer's ``forward`` is, once it is bound to the layer."""
    whole: Whole = layer._moefuse_layer
    hidden, *more = args or (kwargs.get("hidden_states"),)
    module = layer._modules.get(whole.moe)
    if more or "hidden_states" in kwargs or not _may_run(whole, module, hidden, kwargs):
        return type(layer).forward(layer, *args, **kwargs)
    (norm, eps), (second, second_eps) = whole.before, whole.after
    learns = torch.is_grad_enabled()
    normed = None if learns else whole.handoff.take(hidden, norm)
    if normed is None:
        normed = rms_norm(hidden, norm.weight.shape, norm.weight, eps)  # type: ignore[arg-type]
    attends = layer._modules[whole.attention]
    if whole.rule is not None and not learns and takes(attends, hidden, kwargs):
        hidden = attention(attends, whole.rule, normed, hidden, **kwargs)
    else:
        attended, *_ = attends(hidden_states=normed, **kwargs)
        hidden = hidden + attended
    rows = hidden.reshape(-1, hidden.shape[-1])
    options: dict[str, Any] = {"residual": rows}
    following, following_eps = whole.following or (None, 0.0)
    weight: Any = None if following is None or learns else following._parameters["weight"]
    if type(weight) is nn.Parameter and weight.device == hidden.device:
        options |= {"norm_weight": weight, "eps": following_eps}
    result = moe_module.run(module, module._moefuse, rows, (second._parameters["weight"], second_eps), **options)
    if not isinstance(result, tuple):
        return result.view(hidden.shape)
    out, normed = (t.view(hidden.shape) for t in result)
    whole.handoff.put(out, following, normed)  # type: ignore[arg-type]  # there was a weight
    return out


def _may_run(whole: Whole, module: Any, hidden: Any, options: dict[str, Any]) -> bool:
    """Nothing looks at the layer's parts, and they are still what was understood."""
    if not isinstance(hidden, Tensor) or hidden.dim() != 3 or options.get("output_attentions"):
        return False
    if module is None or not hasattr(module, "_moefuse") or not recorded() <= _SHOWN or not are_bare(whole.parts):
        return False
    return not watched(module) and may_fuse(module, module._moefuse, hidden)
