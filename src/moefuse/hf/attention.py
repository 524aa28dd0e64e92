"""Attention of a decoder layer on our ops: one product for q, k and v, one launch for norms, rotation and cache.

A module is taken when running a copy of it on random weights gives what the ops give; see `moefuse.nn.recognize`.
"""

from __future__ import annotations

import copy
import itertools
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moefuse import attend, linear, rope
from moefuse.hf.cache import StepLayer
from moefuse.nn.quantized import weight_of
from moefuse.nn.recognize import NotRecognized, hollow, probing, random_weight, same
from moefuse.ops._core.invariance import is_invariant
from moefuse.quant.tensor import QuantTensor

#: rows from which on a product on a GPU is torch's
_PROMPT_ROWS = 16
_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")


@dataclass(frozen=True)
class AttentionRule:
    """What an attention module computes beside its products.

    Attributes:
        head_dim: of q, k and v.
        scale: of the logits.
        eps: of its norms of q and k.
        norms: "head" where each head is normed, "row" where all of a token's are as one, None without norms.
        doubled: the model's table of cosines lists each angle twice, once for either half of what is rotated.
    """

    head_dim: int
    scale: float
    eps: float
    norms: str | None
    doubled: bool


def _parts(module: Any) -> tuple[int, str | None]:
    """The size of a head and the kind of norms, by the looks of the module."""
    children = dict(module.named_children())
    if not set(_PRODUCTS) <= set(children) <= {*_PRODUCTS, *_NORMS}:
        raise NotRecognized(f"its attention must have the parts {', '.join(_PRODUCTS)}, got {', '.join(children)}")
    if any(weight_of(children[name]) is None for name in _PRODUCTS):
        raise NotRecognized("the products of its attention are wrapped or of another kind")
    own = [name for name, _ in itertools.chain(module.named_parameters(recurse=False), module.named_buffers())]
    own = [name for name in own if name != "sinks" and not name.startswith(_PRODUCTS)]
    D = getattr(module, "head_dim", None)
    if own or not isinstance(D, int):
        raise NotRecognized(
            f"its attention holds more than products and norms, such as {', '.join(own) or 'no head_dim'}"
        )
    if not any(name in children for name in _NORMS):
        return D, None
    if any(list(dict(children[name].named_parameters())) != ["weight"] for name in _NORMS if name in children):
        raise NotRecognized("the norms of its attention must have one weight each")
    return D, "head" if all(children[name].weight.shape == (D,) for name in _NORMS) else "row"


@probing()
def attention_of(module: nn.Module) -> AttentionRule:
    """Recognise an attention module; raises `NotRecognized` with what stands in the way."""
    D, norms = _parts(module)
    scale = getattr(module, "scaling", D**-0.5)
    eps = [value for child in module.children() for value in eps_in(child)]
    if not isinstance(scale, float) or len(set(eps)) > 1:
        raise NotRecognized("its attention must have one scale, and one eps for both norms")
    for angles, doubled in itertools.product((D // 2, D // 4), (True, False)):  # a whole head is rotated, or a half
        rule = AttentionRule(D, scale, eps[0] if eps else 0.0, norms, doubled)
        if _fits(module, rule, angles):
            return rule
    raise NotRecognized("its attention follows none of the known rules")


def eps_in(child: nn.Module) -> list[float]:
    """The eps of a norm, by either of its names."""
    return [value for name, value in vars(child).items() if name in ("eps", "variance_epsilon")]


def _fits(module: Any, rule: AttentionRule, width: int) -> bool:
    """Whether a copy with random weights and few columns gives what the rule does, with so many angles a place."""
    generator = torch.Generator().manual_seed(0)
    B, S, H = 2, 7, 12
    probe: Any = hollow(module).eval()
    probe.config = copy.copy(module.config)
    probe.config._attn_implementation = "eager"
    for name in _PRODUCTS:
        N, K = weight_of(probe._modules[name]).shape  # type: ignore[union-attr]
        rows, columns = (H, K) if name == "o_proj" else (N, H)
        product = probe._modules[name] = nn.Linear(columns, rows, bias=getattr(module, name).bias is not None)
        product.weight = random_weight(generator, rows, columns)
        if product.bias is not None:
            product.bias = random_weight(generator, rows)
    for name in (*_NORMS, "sinks"):
        if name in probe._parameters or (name in probe._modules and hasattr(probe._modules[name], "weight")):
            owner, leaf = (probe, name) if name in probe._parameters else (probe._modules[name], "weight")
            owner._parameters[leaf] = random_weight(generator, *owner._parameters[leaf].shape)
    # Rows small enough to show an eps, and large enough to show a clamp of any kind.
    x = torch.randn(B, S, H, generator=generator) * torch.tensor([1e-3, 0.1, 1.0, 3.0, 10.0, 30.0, 100.0])[:, None]
    angles = 6.3 * torch.rand(B, S, width, generator=generator)
    angles = torch.cat((angles, angles), -1) if rule.doubled else angles
    table = angles.cos(), angles.sin()
    hidden = torch.ones(S, S).triu(1).bool() | (torch.rand(B, 1, S, S, generator=generator) < 0.2)
    mask = torch.zeros(B, 1, S, S).masked_fill(hidden & ~torch.eye(S).bool(), torch.finfo(torch.float32).min)
    places = torch.arange(S).expand(B, S) + 50_000  # a scale that depends on the place shows here
    try:
        with torch.no_grad():
            got = probe(x, position_embeddings=table, attention_mask=mask, past_key_values=None, position_ids=places)
            want = attention(probe, rule, x, torch.zeros_like(x), table, mask)
    except Exception:  # it wants what we do not know of
        return False
    return isinstance(got, tuple) and isinstance(got[0], Tensor) and same(got[0], want, of_row=1)


def _products(rows: Tensor, modules: tuple[Any, ...], residual: Tensor | None = None) -> tuple[Tensor, ...]:
    """What linear layers make of the same rows, plus ``residual``.

    On a GPU many rows times numbers are torch's product in `moefuse.linear`, too; a prompt's host time is shorter
    without a call of ours around it.
    """
    weights: tuple[Any, ...] = tuple(map(weight_of, modules))
    biases = tuple(module.bias for module in modules)
    many = rows.is_cuda and rows.shape[0] > _PROMPT_ROWS and not is_invariant()
    if many and not any(isinstance(w, QuantTensor) for w in weights):
        if residual is None:
            return tuple(map(nn.functional.linear, itertools.repeat(rows), weights, biases))
        if biases == (None,):
            return (torch.addmm(residual, rows, weights[0].T),)
    if residual is None:
        return linear(rows, weights, bias=biases)
    return (linear(rows, *weights, bias=biases[0], residual=residual),)


def _rotated(
    module: Any, rule: AttentionRule, x: Tensor, table: tuple[Tensor, Tensor], **cache: Any
) -> tuple[Any, Tensor]:
    """q and k as `moefuse.rope` returns them, and v: ``[B, S, heads, D]`` from rows ``[B, S, H]``."""
    B, S, H = x.shape
    q, k, v = _products(x.reshape(-1, H), (module.q_proj, module.k_proj, module.v_proj))
    norms: dict[str, Any] = {}
    if rule.norms == "head":
        norms = {"q_norm": module.q_norm.weight, "k_norm": module.k_norm.weight, "eps": rule.eps}
    elif rule.norms == "row":
        q, k = module.q_norm(q), module.k_norm(k)
    q, k, v = (t.view(B, S, -1, rule.head_dim) for t in (q, k, v))
    cos, sin = table
    half = cos.shape[-1] // 2 if rule.doubled else cos.shape[-1]
    if cache:
        cache["v"] = v
    return rope(q, k, cos[..., :half], sin[..., :half], **norms, **cache), v


def takes(module: Any, hidden: Tensor, options: dict[str, Any]) -> bool:
    """Whether `attention` may stand for a module's own forward in a call without gradients."""
    if options.get("position_embeddings") is None or (module.training and getattr(module, "attention_dropout", 0.0)):
        return False
    if torch.is_autocast_enabled(hidden.device.type):
        return False
    weights = [weight_of(module._modules[name]) for name in _PRODUCTS]
    return all(
        isinstance(weight, QuantTensor) or (weight is not None and weight.dtype == hidden.dtype) for weight in weights
    )


def _eager_of(module: nn.Module) -> Any:
    """What transformers takes where no other implementation is named: each family has its own."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _seen(mask: Tensor | None, S: int, L: int, window: int | None) -> Tensor | None:
    """Which of L places each of S queries sees, ``[B or 1, S, L]``; None for a mask that does more than to hide."""
    if mask is not None and mask.dim() == 4:
        hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
        plain = mask.dtype == torch.bool or bool((mask.masked_fill(hidden, 0) == 0).all())
        return ~hidden[:, 0] if plain and mask.shape[1] == 1 else None
    device = None if mask is None else mask.device
    behind = torch.arange(L - S, L, device=device)[:, None] - torch.arange(L, device=device)
    seen = ((behind >= 0) if window is None else (behind >= 0) & (behind < window))[None]
    return seen if mask is None else seen & mask.bool()[:, None, :L]


def _steps(module: Any, q: Tensor, mask: Tensor | None) -> bool:
    """Whether a call decodes one token of each sequence as `moefuse.attend` does.

    torch's own builds a plan of cuDNN's for every number of places, 5 ms each on an H200.
    """
    if q.shape[2] != 1 or q.device.type not in ("cpu", "cuda") or module.config._attn_implementation != "sdpa":
        return False
    return mask is None or (mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1))


def _attend_each(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """Attention of each query as of a step of its own, ``[B, S, heads, D]``: the same bits for a token of a prompt, of
    any piece of it, and of a decode step, whatever pads its sequence."""
    B, _, S, _ = q.shape
    last = torch.full((1,), k.shape[2] - 1, dtype=torch.int64, device=q.device)
    options: dict[str, Any] = {"position": last, "scale": scale, "sinks": sinks}
    seen = seen.to(q.device).expand(B, *seen.shape[1:])
    return torch.stack(
        [
            attend(q[b].transpose(0, 1), *(t[b].expand(S, *t.shape[1:]) for t in (k, v)), mask=seen[b], **options)
            for b in range(B)
        ]
    )


def attention(
    module: Any,
    rule: AttentionRule,
    x: Tensor,
    residual: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **options: Any,
) -> Tensor:
    """``residual`` plus what the module makes of ``x``, both ``[B, S, H]``."""
    B, S, _ = x.shape
    sinks, window = getattr(module, "sinks", None), getattr(module, "sliding_window", None)
    layers = getattr(past_key_values, "layers", ())  # of a cache that grows by layers, too, there may be none yet
    held = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    if isinstance(held, StepLayer) and S == 1 and held.stepping:
        cache: dict[str, Any] = {"keys": held.keys, "values": held.values, "position": held.position}
        q, _ = _rotated(module, rule, x, position_embeddings, **cache)
        mask = None if attention_mask is None else attention_mask[:, 0, 0]
        out = attend(q[:, 0], **cache, mask=mask, scale=rule.scale, window=window, sinks=sinks)
    else:
        (q, k), v = _rotated(module, rule, x, position_embeddings)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, module.layer_idx)
        seen = _seen(attention_mask, q.shape[2], k.shape[2], window) if is_invariant() else None
        if seen is not None:
            out = _attend_each(q, k, v, seen, rule.scale, sinks)
        elif _steps(module, q, attention_mask):
            last = torch.full((1,), k.shape[2] - 1, dtype=torch.int64, device=q.device)
            mask = None if attention_mask is None else attention_mask[:, 0, 0].expand(B, -1)
            # A mask knows of the window, too, and of places of a cache that are not filled yet.
            window = window if mask is None else None
            out = attend(q[:, :, 0], k, v, last, mask=mask, scale=rule.scale, window=window, sinks=sinks)
        else:
            interface = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, _eager_of(module))
            if sinks is not None:
                options["s_aux"] = sinks
            out, _ = interface(
                module, q, k, v, attention_mask, dropout=0.0, scaling=rule.scale, sliding_window=window, **options
            )
    (summed,) = _products(out.reshape(B * S, -1), (module.o_proj,), residual.reshape(B * S, -1))
    return summed.view(residual.shape)
