"""Text from a model, with the time it took; and which experts its tokens went to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from moefuse.hf.gguf import stored_in
from moefuse.hf.support import on_interface


@dataclass(frozen=True)
class Generation:
    """What was generated, and how fast; ``tokens`` are those of the prompt and of the answer."""

    text: str
    tokens: Tensor
    prompt_tokens: int
    prefill_seconds: float
    decode_tokens: int
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first; 0 where there was only one."""
        return self.decode_tokens / self.decode_seconds if self.decode_tokens else 0.0


class _Clock(TextStreamer):
    """Passes text on as it becomes readable, and notes when each token came."""

    def __init__(self, tokenizer: Any, show: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show
        self.text = ""
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002  # the base class's form
        self.text += text
        self.show(text)


class NotFinite(Exception):
    """A model's logits are NaN or infinite; ``where`` is the path of the module in which it began.

    ``tensors`` are those that it has in a GGUF file.
    """

    def __init__(self, where: str, tensors: tuple[str, ...] = ()) -> None:
        named = f" ({', '.join(tensors)})" if tensors else ""
        super().__init__(f"the logits are not finite: it began in {where}{named}")
        self.where, self.tensors = where, tensors


class _Watch(LogitsProcessor):
    """Stops at logits of which no token can be chosen. Tokens that are ruled out have minus infinity."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not bool((scores < torch.inf).all()) or not bool(scores.isfinite().any(-1).all()):
            raise _not_finite(self.model, input_ids)
        return scores


def refuse_not_finite(model: Any, tokens: Tensor, logits: Tensor) -> None:
    """Raise `NotFinite` where the logits of ``tokens`` ``[1, T]`` are."""
    if not bool(logits.isfinite().all()):
        raise _not_finite(model, tokens)


def _not_finite(model: Any, tokens: Tensor) -> NotFinite:
    where = where_not_finite(model, tokens)
    return NotFinite(where, stored_in(model).get(where, ()))


def where_not_finite(model: Any, tokens: Tensor) -> str:
    """The path of the first module that returns a number which is not finite."""
    found: list[str] = []

    def look(path: str) -> Callable[..., None]:
        def hook(_module: Any, _args: Any, out: Any) -> None:
            if not found and any(
                isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all())
                for value in (out if isinstance(out, (tuple, list)) else (out,))
            ):
                found.append(path)

        return hook

    _run_hooked(model, tokens, [m.register_forward_hook(look(path)) for path, m in model.named_modules() if path])
    return found[0] if found else type(model).__name__


def _run_hooked(model: Any, tokens: Tensor, handles: list[Any]) -> None:
    """One pass over ``tokens`` with these hooks, which are gone after it."""
    try:
        with torch.no_grad():
            model(input_ids=tokens)
    finally:
        for handle in handles:
            handle.remove()


def generate(
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    max_tokens: int,
    show: Callable[[str], None],
    temperature: float = 0.0,
    seed: int = 0,
    *,
    to_the_end: bool = False,
) -> Generation:
    """Continue ``prompt`` ``[1, T]``, handing text to ``show`` as it comes.

    ``temperature`` 0 takes the likeliest token each time; any other draws from all of them, from ``seed`` on.
    ``to_the_end`` writes all ``max_tokens``, also past the model's own end. Raises `NotFinite`.
    """
    clock = _Clock(tokenizer, show)
    options: dict[str, Any] = {"min_new_tokens": max_tokens} if to_the_end else {}
    if temperature > 0:
        torch.manual_seed(seed)
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        options["do_sample"] = False
    with torch.no_grad():
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            streamer=clock,
            logits_processor=LogitsProcessorList([_Watch(model)]),
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            **options,
        )
    started, first, *_ = clock.times  # the streamer is given the prompt first
    written = tokens.shape[1] - prompt.shape[1]
    return Generation(clock.text, tokens, prompt.shape[1], first - started, written - 1, clock.times[written] - first)


def expert_load(model: Any, tokens: Tensor) -> dict[str, Tensor]:
    """How many assignments of ``tokens`` ``[1, T]`` go to each expert: path of the experts module -> counts ``[E]``."""
    load: dict[str, Tensor] = {}

    def count(path: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            _, ids, *_ = args
            counts = torch.bincount(ids.flatten().cpu(), minlength=module.num_experts)[: module.num_experts]
            load[path] = load[path] + counts if path in load else counts

        return hook

    # A hook on its experts makes a patched layer take the path on which they are called.
    _run_hooked(model, tokens, [m.register_forward_pre_hook(count(path)) for path, m in on_interface(model)])
    return load
