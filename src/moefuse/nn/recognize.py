"""What a piece of somebody else's layer computes, found out by running it.

Names lie and attributes are incomplete: the class tagged "SoftmaxTopKRouter" may take sigmoids. So each piece is copied
without its weights, given random ones and run on inputs that tell the known rules apart: far inside and far outside
every clamp, scores near zero, selection biases larger than the scores. What no rule reproduces is not recognised.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.nn.quantized import QuantLinear
from moefuse.ops._core.invariance import invariant
from moefuse.ops.glu import glu
from moefuse.ops.route import route
from moefuse.quant.tensor import QuantTensor
from moefuse.types import ACTIVATION_KINDS, LAYOUTS, SCORES, Activation, Routing

# Two float32 computations of one formula differ by a few 1e-7; two formulas by far more on the inputs used here.
_CLOSE = 1e-5
_CLAMPED = ("swiglu_oai", "swiglu_clamp")


class NotRecognized(ValueError):
    """Why a layer is not one that the ops can express."""


def once(seen: dict[Any, Any], structure: Any, find: Callable[[], Any]) -> Any:
    """What ``find`` returns, or the reason it raises, for a structure; one that was ``seen`` is not run again."""
    if structure not in seen:
        try:
            seen[structure] = find()
        except NotRecognized as reason:
            seen[structure] = reason
    if isinstance(seen[structure], NotRecognized):
        raise seen[structure]
    return seen[structure]


def layout_of(experts: Any) -> str:
    """How gate and up rows stand in the stack."""
    return LAYOUTS[0] if getattr(experts, "is_concatenated", True) else LAYOUTS[1]


def activation_of(experts: Any) -> Activation | None:
    """What stands between the products of an experts module, or None where it is none of ours."""
    gated = getattr(experts, "has_gate", True)
    step = getattr(experts, "_apply_gate", None) if gated else getattr(experts, "act_fn", None)
    return _recognize_step(step, experts, gated, layout_of(experts)) if callable(step) else None


@invariant(False)  # what it compares with is plain torch
def _recognize_step(
    step: Callable[[Tensor], Tensor], owner: nn.Module, gated: bool, layout: str = "halves"
) -> Activation | None:
    act_fn = getattr(owner, "act_fn", None)
    if isinstance(act_fn, nn.Module) and any(True for _ in itertools.chain(act_fn.parameters(), act_fn.buffers())):
        return None  # a learned activation has no fixed rule
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # a model may be asked while it is made empty
    line = torch.cat((torch.linspace(-20, 20, 161, **options), torch.tensor([-1e4, -100.0, 100.0, 1e4], **options)))
    if gated:
        gate, up = (value.reshape(-1, 3) for value in torch.meshgrid(line, line[::5], indexing="ij"))
        probe = torch.cat((gate, up), -1) if layout == "halves" else torch.stack((gate, up), -1).flatten(-2)
        size = gate.abs() * (up.abs() + 1)
    else:
        probe = line.unsqueeze(0)
        size = probe.abs()
    try:
        with torch.no_grad(), torch.device("cpu"):
            got = step(probe.clone())
    except Exception:  # whatever stops it on a plain float32 tensor, it is not a rule of ours
        return None
    for candidate in _activations(owner, gated):
        want = glu(probe, candidate, layout=layout, backend="reference")
        # A tail such as 1 + erf(x) cancels, so errors are relative to the inputs' size as well.
        if (
            isinstance(got, Tensor)
            and got.shape == want.shape
            and bool(((got - want).abs() <= 1e-6 * size + _CLOSE * want.abs()).all())
        ):
            return candidate
    return None


def _activations(owner: nn.Module, gated: bool) -> Iterator[Activation]:
    for kind in ACTIVATION_KINDS:
        if kind not in _CLAMPED:
            yield Activation(kind, gated)
    limits = _numbers(owner, "limit")
    for kind, limit in itertools.product(_CLAMPED, limits):
        for alpha in _numbers(owner, "alpha") if kind == "swiglu_oai" else (1.702,):
            if limit > 0 and alpha > 0:
                yield Activation(kind, gated, alpha=alpha, limit=limit)


@contextlib.contextmanager
def probing() -> Iterator[None]:
    """Probes are compared with plain torch, which runs outside `moefuse.invariant` alone. They are small: a second
    thread gains nothing, and where other processes hold the cores it costs twentyfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with invariant(False):
            yield
    finally:
        torch.set_num_threads(threads)


@probing()
def mlp_of(mlp: nn.Module) -> Activation | None:
    """The activation of ``down_proj(act(gate_proj(x)) * up_proj(x))`` or its ungated form; None for anything else."""
    linears = {name: child for name, child in mlp.named_children() if isinstance(child, nn.Linear)}
    gated = "gate_proj" in linears
    if set(linears) != {"up_proj", "down_proj"} | ({"gate_proj"} if gated else set()):
        return None
    if any(type(child) not in (nn.Linear, QuantLinear) or child.bias is not None for child in linears.values()):
        return None
    tensors = itertools.chain(mlp.named_parameters(), mlp.named_buffers())
    if any(name.split(".")[0] not in linears for name, _ in tensors):
        return None
    act_fn = getattr(mlp, "act_fn", None) or getattr(mlp, "activation", None)
    if not callable(act_fn):
        return None
    act = _recognize_step(act_fn, mlp, gated=False)
    if act is None:
        return None
    rule = Activation(act.kind, gated)
    small = hollow(mlp)
    generator = torch.Generator().manual_seed(0)
    for name in linears:
        sizes = (20, 12) if name == "down_proj" else (12, 20)
        small._modules[name] = linear = nn.Linear(*sizes, bias=False)
        linear.weight = random_weight(generator, *linear.weight.shape)
    x = torch.randn(1, 5, 12, generator=generator) * torch.tensor([0.1, 1.0, 10.0, 1e2, 1e4])[:, None]  # past any clamp
    weights: dict[str, Any] = {name: small.get_submodule(name).weight for name in linears}
    rows = [x @ weights[name].T for name in ("gate_proj", "up_proj") if name in weights]
    try:
        with torch.no_grad():
            got = small(x)
            want = glu(torch.cat(rows, -1), rule, backend="reference") @ weights["down_proj"].T
    except Exception:  # it needs more than its input and three products
        return None
    return rule if isinstance(got, Tensor) and same(got, want, of_row=1) else None


@dataclass(frozen=True)
class LayerRule:
    """What a layer of router, experts and shared expert computes. Tensors are named by their path in the layer."""

    routing: Routing
    router: str
    logit_bias: str | None = None
    selection_bias: str | None = None
    shared: str | None = None
    shared_gate: str | None = None
    returns_weights: bool = False
    same_in_training: bool = True


def place_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The module that holds the tensor at a path, and the tensor's name there."""
    owner, _, name = path.rpartition(".")
    return layer.get_submodule(owner), name


def tensor_at(owner: nn.Module, name: str) -> Tensor:
    """A tensor in its place, a single row as a vector."""
    value: Tensor = getattr(owner, name)
    return value.reshape(-1) if value.dim() == 2 and value.shape[0] == 1 else value


def structure_of(layer: nn.Module) -> tuple[Any, ...]:
    """Equal for two layers that differ in the numbers of their tensors only: what one computes, the other does.

    An attribute that is neither a plain value nor shared by the two sets them apart, and so does a layer's own number.
    """
    return tuple((path, type(module), *_structure(path, module)) for path, module in layer.named_modules())


_NO_STRUCTURE = frozenset(vars(nn.Module())) - {"training"}


def _structure(path: str, module: Any) -> tuple[Any, ...]:
    own = {name: value for name, value in vars(module).items() if name not in _NO_STRUCTURE}
    if path == "experts":  # of which a layer knows the sizes, not the weights
        numbers = tuple((name, value) for name, value in own.items() if isinstance(value, (int, float)))
        stack = getattr(module, "down_proj", None)
        return numbers, stack.shape[
            : 3 if getattr(module, "is_transposed", False) else 2
        ] if stack is not None else None
    tensors = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    return (
        tuple((name, value.shape, value.dtype) for name, value in tensors),
        tuple((name, _plain(value)) for name, value in own.items()),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float, str, type, type(None))):
        return type(value), value
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, QuantTensor):
        return value.spec, value.shape
    return id(value)


# Small biases decide between near scores; large ones push keys below zero, where a rule that fills with 0 shows.
_BIAS_SIZES = (0.1, 1.0, 1.0)


@probing()
def rule_of(layer: nn.Module, likely: Iterable[LayerRule] = ()) -> LayerRule:
    """Recognise a layer; raises `NotRecognized` with what stands in the way. ``likely`` rules are tried first."""
    parts = _parts(layer)
    for tried in ((rule.routing,) for rule in dict.fromkeys(likely)), (None,):
        for routings in tried:
            first, *others = [_probe(layer, parts, *draw, routings) for draw in enumerate(_BIAS_SIZES)]
            for rule in first:
                if all(rule in fitting for fitting in others):
                    return rule
    raise NotRecognized("its router follows none of the known rules")


@dataclass(frozen=True)
class _Parts:
    """The tensors of a layer by role; ``vectors`` are per expert and may be a bias of either kind."""

    num_experts: int
    hidden: int
    router: str
    vectors: tuple[str, ...]
    shared: str | None
    shared_gate: str | None


def _parts(layer: nn.Module) -> _Parts:
    experts: Any = getattr(layer, "experts", None)
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, Tensor) or down.dim() != 3:
        raise NotRecognized(f"it must hold a router and stacked experts, got {type(layer).__name__}")
    E = down.shape[0]
    H = down.shape[1 if not getattr(experts, "is_transposed", False) else 2]
    shared = [
        name for name, child in layer.named_children() if isinstance(getattr(child, "down_proj", None), nn.Module)
    ]
    shared_gates = [
        name for name, child in layer.named_children() if isinstance(child, nn.Linear) and child.out_features == 1
    ]
    if len(shared) > 1 or len(shared_gates) > 1 or (shared_gates and not shared):
        raise NotRecognized(f"one shared expert and one gate for it at most, got {', '.join(shared + shared_gates)}")
    if shared_gates and (E == 1 or layer.get_submodule(shared_gates[0]).bias is not None):
        raise NotRecognized(f"the gate of the shared expert must have no bias, got {shared_gates[0]}.bias")
    routers, vectors, foreign = [], [], []
    for path, value in itertools.chain(layer.named_parameters(), layer.named_buffers()):
        if path.split(".")[0] in ("experts", *shared, *shared_gates):
            continue
        if value.is_floating_point() and value.shape == (E, H):
            routers.append(path)
        elif value.is_floating_point() and value.numel() == E and value.shape in ((E,), (1, E)):
            vectors.append(path)
        else:
            foreign.append(f"{path} {list(value.shape)}")
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise NotRecognized(f"it holds more than a router weight and biases per expert, such as {foreign[0]}{more}")
    if len(routers) != 1:
        raise NotRecognized(f"it must hold one router weight [{E}, {H}], got {len(routers)}")
    return _Parts(E, H, routers[0], tuple(vectors), *(names[0] if names else None for names in (shared, shared_gates)))


class _Recorder(nn.Module):
    """Stands in for experts and shared expert: keeps what it is given and answers with known rows."""

    def __init__(self, like: nn.Module, answer: Tensor) -> None:
        super().__init__()
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []
        for name, value in vars(like).items():  # layers read sizes off their experts
            if not name.startswith("_") and isinstance(value, (int, float)) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.calls.append((hidden_states, *rest, *named.values()))
        return self.answer.clone().view(hidden_states.shape)


def _probe(
    layer: nn.Module, parts: _Parts, seed: int, bias_size: float, routings: tuple[Routing, ...] | None
) -> list[LayerRule]:
    """The rules that fit the layer on one draw of weights and inputs, simple ones first."""
    generator = torch.Generator().manual_seed(seed)
    E, H = parts.num_experts, parts.hidden
    probe = hollow(layer)
    T = 2 * 48
    answers = [torch.randn(T, H, generator=generator) for _ in range(2)]
    experts = probe._modules["experts"] = _Recorder(layer.get_submodule("experts"), answers[0])
    shared = None
    if parts.shared is not None:
        shared = probe._modules[parts.shared] = _Recorder(layer.get_submodule(parts.shared), answers[1])
    # One direction is common to all experts: along it every score falls towards zero together.
    common = torch.randn(H, generator=generator)
    common /= common.norm()
    weight = _set(probe, parts.router, torch.randn(E, H, generator=generator) * 2 * H**-0.5 + common)
    vectors = {path: _set(probe, path, bias_size * torch.randn(E, generator=generator)) for path in parts.vectors}
    shared_gate = None
    if parts.shared_gate is not None:
        shared_gate = _set(probe, f"{parts.shared_gate}.weight", torch.randn(1, H, generator=generator) * H**-0.5)[0]
    x = torch.randn(2, 48, H, generator=generator)
    x[:, 12:24] *= 0.2
    x[:, 24:36] *= 1.5  # not more: sigmoids that round to 1 are ties
    x[:, 36:] -= common * torch.linspace(6, 14, 12)[:, None]
    rows = x.view(T, H)

    out = _run(probe.eval(), x)
    weights_too = isinstance(out, tuple)
    if isinstance(out, tuple) and len(out) == 2:
        out, second = out
    if len(experts.calls) != 1 or len(experts.calls[0]) != 3:
        raise NotRecognized(f"it must call its experts once with rows, ids and weights, got {len(experts.calls)} calls")
    given, ids, weights = experts.calls[0]
    if not isinstance(out, Tensor) or out.shape != x.shape or out.dtype != x.dtype:
        raise NotRecognized("it must return one tensor like its input, or that and the routing weights")
    if weights_too and not (isinstance(second, Tensor) and torch.equal(second, weights)):
        raise NotRecognized("it returns a second value that is not the routing weights")
    if given.shape != rows.shape or not torch.equal(given, rows):
        raise NotRecognized("it changes the hidden state before the experts")
    seen = [] if shared is None else [hidden_states.reshape(T, H) for hidden_states, *_ in shared.calls]
    if shared is not None and (len(seen) != 1 or not torch.equal(seen[0], rows)):
        raise NotRecognized("it changes the hidden state before the shared expert, or does not always run it")
    factor = _composition(out.reshape(T, H), answers[0], answers[1] if shared is not None else None, shared_gate, rows)
    numbers = {1.0, *_numbers(layer), *(n for child in probe.modules() for n in _numbers(child))}
    numbers |= set(_numbers(getattr(layer, "config", None)))
    if routings is None:
        routings = tuple(_rules(ids.shape[1], E, probe))
    fitting = _routings(rows, weight, vectors, ids, weights * _snap(factor, numbers), numbers, routings)
    rest = (parts.shared, parts.shared_gate, weights_too, _same_in_training(probe, x, out, experts))
    return [LayerRule(rule, parts.router, logit, selection, *rest) for rule, logit, selection in fitting]


def _run(probe: nn.Module, x: Tensor) -> Any:
    try:
        with torch.no_grad():
            return probe(x.clone())
    except Exception as error:  # anything: the layer wants what we do not know of
        raise NotRecognized(f"it does not run on a hidden state alone: {type(error).__name__}: {error}") from error


def _same_in_training(probe: nn.Module, x: Tensor, want: Tensor, experts: _Recorder) -> bool:
    routed = experts.calls[-1]
    try:
        out = _run(probe.train(), x)
    except NotRecognized:
        return False
    out = out[0] if isinstance(out, tuple) else out
    return torch.equal(out, want) and all(torch.equal(a, b) for a, b in zip(experts.calls[-1], routed, strict=True))


def _composition(out: Tensor, routed: Tensor, shared: Tensor | None, shared_gate: Tensor | None, rows: Tensor) -> float:
    """The factor ``a`` in ``out = a * routed + g * shared`` with g = 1, or the sigmoid of the shared gate's product."""
    if shared is not None:
        out = out - shared * (1 if shared_gate is None else torch.sigmoid(rows @ shared_gate)[:, None])
    factor = float((out * routed).sum() / routed.square().sum())
    if not same(out, factor * routed, of_row=1):
        raise NotRecognized("its result is not the sum of experts and shared expert")
    return factor


def _routings(
    rows: Tensor,
    weight: Tensor,
    vectors: dict[str, Tensor],
    ids: Tensor,
    weights: Tensor,
    numbers: set[float],
    candidates: tuple[Routing, ...],
) -> list[tuple[Routing, str | None, str | None]]:
    """The rules that give these ids and weights, and which vectors are their biases."""
    E = weight.shape[0]
    if len(vectors) > 2:
        raise NotRecognized(f"two biases per expert at most, got {', '.join(vectors)}")
    seen = _dense(ids, weights.float(), E)
    logits = rows @ weight.T
    slots: list[str | None] = [None, *vectors]
    found = []
    for logit_bias, selection_bias in itertools.product(slots, slots):
        if {logit_bias, selection_bias} - {None} != set(vectors) or (logit_bias == selection_bias is not None):
            continue
        biased = logits if logit_bias is None else logits + vectors[logit_bias]
        bias = None if selection_bias is None else vectors[selection_bias]
        for candidate in candidates:
            rule = dataclasses.replace(candidate, scale=1.0)
            scale = _fit(seen, biased, bias, rule) if rule.top_k == ids.shape[1] else None
            if scale is not None:
                scaled = dataclasses.replace(rule, scale=_snap(scale, numbers))
                found.append((scaled, logit_bias, selection_bias))
    return found


def _fit(seen: Tensor, logits: Tensor, bias: Tensor | None, rule: Routing) -> float | None:
    """The factor between a rule's weights ``[T, E]`` and those seen; None where the rule is another."""

    def by_rule(logits: Tensor) -> Tensor:
        weights, ids = route(logits, rule, bias=bias, backend="reference")
        return _dense(ids.long(), weights, logits.shape[1])

    got = by_rule(logits)
    if 4 * int(((got > 0) == (seen > 0)).all(-1).sum()) < 3 * len(seen):
        return None
    nudged = [by_rule(logits + sign * 1e-5 * torch.linspace(-1, 1, logits.shape[1])) for sign in (1, -1)]
    firm = torch.stack([((got > 0) == (other > 0)).all(-1) for other in nudged]).all(0)  # no near tie in the row
    got, seen = got[firm], seen[firm]
    if 4 * len(got) < 3 * len(logits) or not torch.equal(got > 0, seen > 0):
        return None
    scale = float((seen[got > 0] / got[got > 0]).median())
    return scale if same(seen, got * scale) else None


def _rules(top_k: int, E: int, probe: nn.Module) -> Iterator[Routing]:
    """Rules to try, simple ones first."""
    groups: list[dict[str, Any]] = [{}]
    sizes = {int(n) for m in probe.modules() for n in _numbers(m, "group") if n == int(n) and 1 <= n <= E}
    for count, kept in itertools.permutations(sorted(sizes), 2):
        if E % count == 0 and kept < count:
            groups += [{"groups": count, "top_groups": kept, "group_score": how} for how in ("top2_sum", "max")]
    caps: list[float | None] = [None, *(n for m in probe.modules() for n in _numbers(m, "softcap") if n > 0)]
    floors: list[float | None] = [None, *(n for m in probe.modules() for n in _numbers(m, "norm_min"))]
    for score, renormalize, group, softcap, floor in itertools.product(SCORES, (True, False), groups, caps, floors):
        yield Routing(top_k, score, renormalize, softcap=softcap, norm_floor=floor, **group)


def _snap(value: float, numbers: set[float]) -> float:
    """The number of the layer that a fitted factor is."""
    nearest = min(numbers, key=lambda number: abs(number - value))
    if abs(nearest - value) > _CLOSE * abs(value):
        raise NotRecognized(f"a factor of {value:.6g} is applied that the layer does not name")
    return nearest


def _dense(ids: Tensor, weights: Tensor, E: int) -> Tensor:
    return torch.zeros(ids.shape[0], E + 1).scatter_add_(1, ids.clamp(0, E), weights)[:, :E]


def same(got: Tensor, want: Tensor, of_row: float = 1e-3) -> bool:
    """Equal up to rounding, relative to the element or to this much of the row: 1 where sums may cancel."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return False
    room = want.abs() + of_row * want.abs().amax(-1, keepdim=True)
    return bool(((got.float() - want.float()).abs() <= _CLOSE * room + 1e-30).all())


def _numbers(owner: Any, part: str = "") -> list[float]:
    """Numeric attributes of a module or a configuration whose name contains ``part``."""
    found = vars(owner) if owner is not None else {}
    return [
        float(value)
        for name, value in found.items()
        if part in name and isinstance(value, (int, float)) and not isinstance(value, bool)
    ]


def hollow(module: nn.Module) -> nn.Module:
    """A copy that shares no dictionaries and no hooks with the original, so that its tensors can be replaced."""
    clone = copy.copy(module)
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            clone.__dict__[name] = type(value)()
    clone.__dict__.pop("forward", None)
    clone._parameters, clone._buffers = dict(module._parameters), dict(module._buffers)
    clone._modules = {
        name: child if child is None or name == "experts" else hollow(child) for name, child in module._modules.items()
    }
    return clone


def random_weight(generator: torch.Generator, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=generator) * shape[-1] ** -0.5, requires_grad=False)


def _set(module: nn.Module, path: str, value: Tensor) -> Tensor:
    """Put ``value`` where a parameter or buffer stands, in its shape; returns it as it was given."""
    owner, name = place_of(module, path)
    shaped = value.view(getattr(owner, name).shape)
    if name in owner._buffers:
        owner._buffers[name] = shaped
    else:
        owner._parameters[name] = nn.Parameter(shaped, requires_grad=False)
    return value
