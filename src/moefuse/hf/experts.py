"""The experts implementation "moefuse": one function for every layout that transformers' experts interface has."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from moefuse import experts, plan
from moefuse.hf.gguf_experts import BlockExperts
from moefuse.nn.place import placed
from moefuse.nn.recognize import activation_of, layout_of
from moefuse.nn.routing_tape import Player, Tape
from moefuse.nn.shared import stack_arguments
from moefuse.ops.composed import composed
from moefuse.types import Activation, Stacks, Tail


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls: rows ``[T, H]``, ids and weights ``[T, top_k]``; returns ``[T, H]``.

    An id outside the module's experts, as expert parallelism marks the slots of other ranks, contributes nothing. On a
    CPU the first call changes the strides of parameters kept as ``[E, in, out]``: see `_lay_rows_along_the_input`.
    """
    stacks = stacks_of(module)
    tape = getattr(module, "_routing_tape", None)
    if tape is not None:
        top_k_index, top_k_weights = _taped(tape, top_k_index, top_k_weights)
    # Under autocast the rows may be wider or narrower than the weights; like the built-in paths, the weights decide.
    x = hidden_states.to(module.down_proj.dtype)
    weights = top_k_weights.to(x.dtype) if x.dtype == torch.float64 else top_k_weights
    activation = known_activation(module)
    apart = placed(module)
    out: Any  # no norm_weight is given, so each op returns one tensor
    if apart is not None:
        out = apart(x, top_k_index, weights)
    elif activation is None or getattr(module, "has_post_expert_norm", False):
        out = _with_own_parts(module, x, top_k_index, weights, stacks)
    else:
        out = experts(x, top_k_index, weights, activation=activation, **stack_arguments(stacks))
    return out.to(hidden_states.dtype)  # type: ignore[no-any-return]


def _taped(tape: Tape, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What the model's own router chose for its experts, taken down or replaced."""
    if not isinstance(tape, Player):
        tape.record(ids, weights)
        return ids, weights
    replayed, given = tape.next(ids)
    if given is None:
        raise ValueError(
            f"RoutingTape.replay: {tape.name} must run as a whole to weigh replayed experts, got a call that looks at "
            "its parts, such as output_router_logits; record and replay with weights=True"
        )
    if replayed.shape != ids.shape:
        raise ValueError(f"RoutingTape.replay: {tape.name} must have top-{replayed.shape[1]}, got top-{ids.shape[1]}")
    return replayed, given.to(weights.dtype)


def refuse_fp8(module: nn.Module, *_: Any, **__: Any) -> Tensor:
    """What transformers calls for its own FP8 experts: ours are made of them when a model is loaded."""
    name = type(module).__name__
    raise NotImplementedError(
        f'experts_implementation="moefuse" does not compute {name}: its weights are FP8 as transformers keeps them. '
        'Load the model with from_pretrained(path, experts_implementation="moefuse"), or choose "grouped_mm"'
    )


def stacks_of(module: Any) -> Stacks:
    """The module's own tensors; a stack that is kept as [E, in, out] comes as a transposed view."""
    if isinstance(module, BlockExperts):
        return module.stacks()
    gate_up = module.gate_up_proj if module.has_gate else module.up_proj
    down = module.down_proj
    if module.is_transposed:
        _lay_rows_along_the_input(gate_up)
        _lay_rows_along_the_input(down)
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    if not module.has_bias:
        return Stacks(gate_up, None, down, layout=layout_of(module))
    gate_up_bias = module.gate_up_proj_bias if module.has_gate else module.up_proj_bias
    return Stacks(gate_up, None, down, gate_up_bias, module.down_proj_bias, layout_of(module))


def _lay_rows_along_the_input(stack: Tensor) -> None:
    """Change the strides of a user's ``[E, in, out]`` parameter so that its transposed view is dense.

    The CPU kernels read along the input dimension and would copy the stack at each call, and a copy kept beside it
    would double the memory of the model. So the parameter's own ``data`` is replaced, once: shape, values, gradients
    and what is saved stay, its address and strides do not. While it moves, this one stack is there twice. `unpatch`
    moves it back.
    """
    if torch.compiler.is_compiling() or stack.device.type != "cpu" or stack.stride(1) == 1:
        return
    if type(stack) in (Tensor, nn.Parameter) and stack.is_leaf:  # a sum of weight and adapter is made for one call
        with torch.inference_mode(False):  # the new memory must stay fit for training
            stack.data = stack.data.transpose(1, 2).contiguous().transpose(1, 2)


def restore_order(module: Any) -> None:
    """Undo what `stacks_of` did to the memory of a transposed stack."""
    for stack in module.parameters(recurse=False):
        if module.is_transposed and stack.dim() == 3 and not stack.is_contiguous():
            with torch.inference_mode(False):
                stack.data = stack.data.contiguous()


#: where a module keeps the fields of its activation, empty where it is none of ours: plain values, which torch.compile
#: takes as constants of the traced program and may share between layers
_KEPT = "_moefuse_activation"


def known_activation(module: nn.Module) -> Activation | None:
    """The module's activation where it is one of ours; looked into once per module."""
    fields = getattr(module, _KEPT, None)
    if fields is None:
        fields = _fields_at(id(module)) if torch.compiler.is_compiling() else _keep_fields(module)
    return Activation(*fields) if fields else None


def _fields_of(module: Any) -> tuple[Any, ...]:
    found = module.activation if isinstance(module, BlockExperts) else activation_of(module)
    return () if found is None else dataclasses.astuple(found)


def _keep_fields(module: nn.Module) -> tuple[Any, ...]:
    fields = _fields_of(module)
    setattr(module, _KEPT, fields)
    return fields


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _fields_at(address: int) -> tuple[Any, ...]:
    """For a module that is traced before it ever ran. torch 2.11 takes no module as argument of such a function."""
    return _fields_of(ctypes.cast(address, ctypes.py_object).value)


def _with_own_parts(module: Any, x: Tensor, ids: Tensor, weights: Tensor, stacks: Stacks) -> Any:
    """Our products and sum around the module's own activation and norm."""
    own_activation = module._apply_gate if module.has_gate else module.act_fn
    own_norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    order = plan(ids, stacks.down.shape[0])
    return composed(x, ids, weights, stacks, order, own_activation, Tail(), after=own_norm)
