"""Text from a model, with the time it took; and which experts its tokens went to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, TextStreamer

from moefuse.hf.gguf import stored_in
from moefuse.hf.support import on_interface

#: tokens of a prompt that go in at once where its progress is shown
PIECE = 512


@dataclass(frozen=True)
class Generation:
    """What was generated, and how fast.

    Attributes:
        texts: the answer to each prompt.
        tokens: those of each prompt and of its answer, ``[T]``, without padding.
        prompt_tokens: of all prompts, without those that the cache of a conversation held.
        prefill_seconds: from the prompts to the first token.
        first_token: when that came, by ``time.perf_counter``.
        decode_tokens: of all answers, each without its first.
        decode_seconds: from the first token to the last.
    """

    texts: list[str]
    tokens: list[Tensor]
    prompt_tokens: int
    prefill_seconds: float
    first_token: float
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
    """Passes text on, that of one prompt as it becomes readable, and notes when each token came."""

    def __init__(self, tokenizer: Any, show: Callable[[int, str], None], watch: _Watch, ends: set[int]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.watch, self.ends = show, watch, ends
        self.times: list[float] = []
        self.answers: list[list[int]] = []
        self.texts: list[str] = []

    def put(self, value: Tensor) -> None:
        self.watch.look()
        self.times.append(time.perf_counter())
        if not self.answers:  # the prompts come first
            self.answers, self.texts = [[] for _ in value], ["" for _ in value]
        else:
            for row, token in enumerate(value.tolist()):
                if not self._ended(row):
                    self.answers[row].append(token)
                    if len(self.answers) > 1 and self._ended(row):
                        self._show_whole(row)
        if len(self.answers) == 1:
            super().put(value)  # type: ignore[no-untyped-call]  # transformers leaves it untyped

    def end(self) -> None:
        if len(self.answers) == 1:
            super().end()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
            return
        for row in range(len(self.answers)):
            if not self._ended(row):
                self._show_whole(row)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:  # noqa: ARG002  # the base class's form
        self.texts[0] += text
        self.show(0, text)

    def _ended(self, row: int) -> bool:
        return any(token in self.ends for token in self.answers[row][-1:])

    def _show_whole(self, row: int) -> None:
        text: Any = self.tokenizer.decode(self.answers[row], skip_special_tokens=True)
        self.texts[row] = text
        self.show(row, text)


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

    def __init__(self, model: Any, at_once: bool) -> None:
        self.model, self.at_once = model, at_once
        self.seen: tuple[Tensor, Tensor] | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen = input_ids, scores.amax(-1).isfinite().all()
        if self.at_once:  # nothing can be drawn from them
            self.look()
        return scores

    def look(self) -> None:
        """Raise `NotFinite`. A GPU is waited for, so that the likeliest token is only looked at when it is shown."""
        if self.seen is not None:
            tokens, finite = self.seen
            if not bool(finite):
                raise _not_finite(self.model, tokens)


def refuse_not_finite(model: Any, tokens: Tensor, logits: Tensor) -> None:
    """Raise `NotFinite` where the logits of ``tokens`` ``[B, T]`` are."""
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


def _run_hooked(model: Any, sequences: Iterable[Tensor], handles: list[Any]) -> None:
    """One pass over each sequence ``[T]`` with these hooks, which are gone after it."""
    try:
        with torch.no_grad():
            for tokens in sequences:
                model(input_ids=tokens[None])
    finally:
        for handle in handles:
            handle.remove()


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Tensor],
    max_tokens: int,
    show: Callable[[int, str], None],
    temperature: float = 0.0,
    seed: int = 0,
    *,
    to_the_end: bool = False,
    conversation: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Generation:
    """Continue prompts ``[T]``, all at once.

    Where `moefuse.hf.capture` has prepared a step for as many, that decodes. Raises `NotFinite`.

    Args:
        show: takes the number of a prompt and text: of one prompt as it comes, of several each answer when it is done.
        temperature: 0 takes the likeliest token each time; any other draws from all of them, from ``seed`` on.
        to_the_end: write all ``max_tokens``, also past the model's own end.
        conversation: the captured step runs only what its cache does not hold from the last call of this kind.
        progress: the captured step takes `PIECE` tokens of a prompt at a time, and tells how many are done.
    """
    B = len(prompts)
    device = prompts[0].device
    padding = next((t for t in (tokenizer.pad_token_id, tokenizer.eos_token_id) if t is not None), 0)
    S = max(len(prompt) for prompt in prompts)
    tokens = torch.full((B, S), padding, device=device)
    mask = torch.zeros((B, S), dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, S - len(prompt) :] = prompt
        mask[row, S - len(prompt) :] = 1
    step = getattr(model, "_moefuse_steps", {}).get(B)
    if step is not None:
        step.keeps, step.progress, step.piece = conversation, progress, None if progress is None else PIECE
    ends = model.generation_config.eos_token_id
    watch = _Watch(model, temperature > 0)
    clock = _Clock(tokenizer, show, watch, set(ends) if isinstance(ends, list) else {ends})
    options: dict[str, Any] = {"min_new_tokens": max_tokens} if to_the_end else {}
    if temperature > 0:
        torch.manual_seed(seed)
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        options["do_sample"] = False
    with torch.no_grad():
        model.generate(
            tokens,
            attention_mask=mask,
            max_new_tokens=max_tokens,
            streamer=clock,
            logits_processor=LogitsProcessorList([watch]),
            pad_token_id=padding,
            **options,
        )
    started, first, *_ = clock.times
    kept = step.kept if step is not None and conversation else 0
    return Generation(
        clock.texts,
        [torch.cat((p, p.new_tensor(answer))) for p, answer in zip(prompts, clock.answers, strict=True)],
        sum(len(prompt) - kept for prompt in prompts),
        first - started,
        first,
        sum(len(answer) - 1 for answer in clock.answers),
        clock.times[-1] - first,
    )


def joined(turns: Sequence[Generation]) -> Generation:
    """The turns of a conversation as one; the first token is that of the first turn."""
    return Generation(
        [text for turn in turns for text in turn.texts],
        turns[-1].tokens,
        sum(turn.prompt_tokens for turn in turns),
        sum(turn.prefill_seconds for turn in turns),
        turns[0].first_token,
        sum(turn.decode_tokens for turn in turns),
        sum(turn.decode_seconds for turn in turns),
    )


def expert_load(model: Any, sequences: Iterable[Tensor]) -> dict[str, Tensor]:
    """How many assignments of sequences ``[T]`` go to each expert: path of the experts module -> counts ``[E]``."""
    load: dict[str, Tensor] = {}

    def count(path: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            _, ids, *_ = args
            counts = torch.bincount(ids.flatten().cpu(), minlength=module.num_experts)[: module.num_experts]
            load[path] = load[path] + counts if path in load else counts

        return hook

    # A hook on its experts makes a patched layer take the path on which they are called.
    _run_hooked(model, sequences, [m.register_forward_pre_hook(count(path)) for path, m in on_interface(model)])
    return load
