"""A decode step that is captured once and replayed for every token, over a cache whose memory never moves."""

from __future__ import annotations

import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from moefuse.hf.cache import StepCache
from moefuse.nn.accelerator import Captured
from moefuse.nn.place import placed, placement_of
from moefuse.nn.routing_tape import is_taped
from moefuse.ops._core.checks import check_count
from moefuse.ops._core.invariance import is_invariant
from moefuse.ops._core.tape import Tape

_log = logging.getLogger("moefuse")

#: arguments of a forward that a captured step knows; with others, such as pictures, transformers' own loop runs
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "use_cache", "cache_position", "logits_to_keep"}
#: options of generate that ask for more than the likeliest or a drawn token, and the value that does not
_PLAIN = {
    "num_beams": 1, "penalty_alpha": None, "dola_layers": None, "prompt_lookup_num_tokens": None, "use_cache": True,
    "cache_implementation": None, "output_attentions": False, "output_hidden_states": False, "assistant_model": None,
    "custom_generate": None, "past_key_values": None, "inputs_embeds": None, "prefill_chunk_size": None,
    "assistant_early_exit": None, "constraints": None, "force_words_ids": None, "num_beam_groups": 1,
}  # fmt: skip


#: runs of a step before it is captured
_WARM = 2


class Step:
    """One token for each of ``batch`` sequences: what is captured, and the tensors it reads and writes."""

    def __init__(self, model: Any, batch: int, max_length: int) -> None:
        self.model, self.batch, self.device = model, batch, model.device
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.cache = StepCache(layers, max_length, self.device)
        self.tokens = torch.zeros((batch, 1), dtype=torch.int64, device=self.device)
        self.places = torch.zeros((batch, 1), dtype=torch.int64, device=self.device)
        self.mask = torch.ones((batch, max_length), dtype=torch.bool, device=self.device)
        # Layers that attend with our op want the mask of padding alone; any other a mask of its own making.
        own = [m for m in model.modules() if getattr(vars(m).get("_moefuse_layer"), "rule", None) is not None]
        self.padding_only = len(own) == layers
        #: in a conversation a prompt that begins with what the cache holds starts behind that, ``kept`` tokens
        self.keeps, self.kept = False, 0
        self.held: Tensor | None = None
        #: a long prompt goes in by pieces, and this is told how many of its tokens are done after each
        self.piece: int | None = None
        self.progress: Callable[[int], None] | None = None
        #: the mode of what was captured
        self.invariant = is_invariant()
        self.placement = placement_of(model)
        self.slots = 0
        self.logits: Tensor | None = None
        if self.device.type == "cuda":
            self.logits = self._capture()
        #: on a CPU, what a step does; None before the first, and where it cannot be taken down
        self.tape: Tape | None = None
        self.tapes = self.device.type == "cpu" and self.placement is None

    def _capture(self) -> Tensor:
        self.prefill(self.tokens, None)
        return self._capture_step()

    def _capture_step(self) -> Tensor:
        with _uncollected(), nullcontext() if self.placement is None else self.placement.still():
            return self._captured()

    def _captured(self) -> Tensor:
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM):  # kernels are compiled, and what is kept is allocated
                self._forward()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        if self.placement is not None:  # the CPU's experts run between the graphs of a step
            self.slots = self.placement.slots
            captured = Captured(self.placement.accelerator, self._forward)
            self.replay = captured.run
            return captured.result  # type: ignore[no-any-return]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward()
        self.replay = graph.replay
        return logits

    def _forward(self) -> Tensor:
        self.cache.stepping = True
        mask = self.mask[:, None, None] if self.padding_only else self.mask
        try:
            out = self.model(
                input_ids=self.tokens,
                attention_mask=mask,
                position_ids=self.places,
                past_key_values=self.cache,
                use_cache=True,
            )
        finally:
            self.cache.stepping = False
        self.cache.position.add_(1)
        self.places.add_(1)
        logits: Tensor = out.logits[:, -1]
        return logits

    def prefill(self, tokens: Tensor, mask: Tensor | None, places: Tensor | None = None) -> Tensor:
        """Logits ``[B, V]`` behind the prompts ``[B, S]``, which fill the cache; ``mask`` is 0 where one is padded."""
        S, start = tokens.shape[1], 0
        self.mask.fill_(True)
        if mask is None or bool(mask.all()):
            mask = None
            places = torch.arange(S, device=self.device).expand(self.batch, S) if places is None else places
            start = self._held_of(tokens) if self.keeps else 0
        else:
            self.mask[:, :S] = mask.bool()
            places = (mask.long().cumsum(-1) - 1).clamp_min(0) if places is None else places
        self.held, self.kept = None, start  # until the answer is there
        if start == 0:
            self.cache.clear()
        self.cache.length = start
        piece = self.piece or S
        for stop in (*range(start + piece, S, piece), S):
            out = self.model(
                input_ids=tokens[:, start:stop],
                attention_mask=None if mask is None else mask[:, :stop],
                position_ids=places[:, start:stop],
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
            self.cache.length = start = stop
            if self.progress is not None:
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.progress(stop)
        self.cache.position.fill_(S)
        self.places.copy_(places[:, -1:] + 1)
        logits: Tensor = out.logits[:, -1]
        if self.logits is not None and self._has_fewer_slots() and self.cache.max_length > S + _WARM:
            before = self._here()
            self.logits = self._capture_step()
            self._go_to(*before)
        return logits

    def _held_of(self, tokens: Tensor) -> int:
        """How many tokens at the beginning are those of the cache; never all, as the last one's logits are wanted."""
        if self.held is None:
            return 0
        length = min(self.held.shape[1], tokens.shape[1] - 1)
        differs = (self.held[:, :length] != tokens[:, :length]).any(0).nonzero()
        return int(differs[0]) if len(differs) else length

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits ``[B, V]`` behind these tokens ``[B]``; the next call overwrites them."""
        self.tokens.copy_(tokens[:, None])
        self.cache.length += 1
        if self.logits is None or self._has_fewer_slots():
            return self._taped() if self.tapes else self._forward()
        self.replay()
        return self.logits

    def _has_fewer_slots(self) -> bool:
        """Whether memory ran out since the capture, which knew more slots."""
        return self.placement is not None and self.placement.slots != self.slots

    def _taped(self) -> Tensor:
        """A step on a CPU: the first is taken down, the second proves the tape, and the tape runs the others."""
        logits: Tensor
        if self.tape is None or self.tape.stale or self.invariant != is_invariant():
            self.proven, self.invariant = False, is_invariant()
            before = self._here()
            try:
                self.tape = Tape(self._forward)
            except Exception as reason:  # whatever was not made for being watched; an error of the step comes again
                _log.info("moefuse: decode steps are not taken down: %s", reason)
                self.tapes, self.tape = False, None
                self._go_to(*before)
                return self._forward()
            logits = self.tape.result
        elif not self.proven:
            before = self._here()
            got = self.tape.run()  # first, so that the cache lacks what it fails to write
            self._go_to(*before)
            logits = self._forward()
            self.proven = self.tapes = torch.equal(logits, got)
            if not self.proven:
                _log.info("moefuse: decode steps are not taken down: run again, one gave other numbers")
                self.tape = None
        else:
            logits = self.tape.run()
        return logits

    def _here(self) -> tuple[Tensor, Tensor]:
        return self.cache.position.clone(), self.places.clone()

    def _go_to(self, position: Tensor, places: Tensor) -> None:
        self.cache.position.copy_(position)
        self.places.copy_(places)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected: giving back what an earlier model had may wait for the GPU, which ends a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def capture(model: Any, batch: int | Iterable[int] = 1, max_length: int = 2048) -> str:
    """Decode with a step that is captured once, in ``model.generate`` and without further words.

    For each batch size a static cache is allocated and a decode step captured as a CUDA graph; on a CPU, which has no
    graphs, what the first step runs is taken down and, once the second has proved it, run again. ``generate`` takes it
    for greedy decoding and sampling of as many sequences, with any logits processors, stopping criteria and streamers,
    prompts padded on the left; new prompts need no new capture. Everything else (beams, assistants, other batch sizes,
    inputs that are not text) runs as before. Weights must stay where they are: after ``model.to`` or `patch`, call it
    again.

    Args:
        model: a causal language model of transformers, best after `patch`.
        batch: sequences in a step, one number or several.
        max_length: places in the cache: tokens of prompt and answer.

    Returns:
        what was captured, in words.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise TypeError(f"capture: model must be a transformers model that generates, got {type(model).__name__}")
    batches = (batch,) if isinstance(batch, int) else tuple(batch)
    for size in batches:
        check_count("capture", "batch", size, 1)
    check_count("capture", "max_length", max_length, 2)
    _refuse(model)
    uncapture(model)
    started = time.perf_counter()
    training = model.training
    with torch.no_grad():
        model.eval()
        try:
            steps = {size: Step(model, size, max_length) for size in batches}
        finally:
            model.train(training)
    taken: Any = model
    taken._moefuse_steps, taken.generate = steps, functools.partial(_generate, model)
    how = "captured" if taken.device.type == "cuda" else "prepared"
    sizes = ", ".join(map(str, batches))
    return f"decode step {how} for batch {sizes}, {max_length} places, in {time.perf_counter() - started:.1f} s"


def uncapture(model: Any) -> None:
    """Undo `capture`, and free its memory."""
    if vars(model).pop("_moefuse_steps", None) is not None:
        del model.generate


def _refuse(model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or model.config.is_encoder_decoder:
        what = ", ".join(sorted(kinds)) or "an encoder"
        raise ValueError(f"capture: every layer of the model must keep keys and values, got {what}")
    owners = (module for module in model.modules() if placed(module) is None)
    devices = {p.device for module in owners for p in module.parameters(recurse=False)}
    if len(devices) > 1:
        raise ValueError(f"capture: the model must lie on one device, got {', '.join(sorted(map(str, devices)))}")


def _generate(model: Any, inputs: Tensor | None = None, generation_config: Any = None, **options: Any) -> Any:
    """``model.generate``, with our loop where the request is one for it."""
    config = generation_config or model.generation_config
    asked = {name: options.get(name, getattr(config, name, plain)) for name, plain in _PLAIN.items()}
    if all(asked[name] in (None, plain) for name, plain in _PLAIN.items()):
        # transformers gives a loop of others the arguments that its own lack, and no streamer.
        options["custom_generate"] = functools.partial(_decode, streamer=options.get("streamer"))
    return type(model).generate(model, inputs, generation_config, **options)


def _decode(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,  # noqa: ARG001  # asked for, so that transformers has it for stop strings
    **model_kwargs: Any,
) -> Any:
    """Tokens one by one, as transformers' own loop draws them, each from a replayed step."""
    step = model._moefuse_steps.get(input_ids.shape[0])
    given = {name for name, value in model_kwargs.items() if value is not None}
    reason = _why_uncaptured(model, step, input_ids) or ("more than text" if synced_gpus or not given <= _KNOWN else "")
    if reason:
        _log.info("moefuse: generate runs uncaptured: %s", reason)
        return model._sample(
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
    S = input_ids.shape[1]
    longest = stopping_criteria.max_length or step.cache.max_length
    if step.cache.max_length <= S:
        raise ValueError(
            f"generate: the prompt must be shorter than the cache of {step.cache.max_length} places, got {S} tokens: "
            f"moefuse.hf.capture(model, max_length=...) makes a longer one"
        )
    if longest > step.cache.max_length:
        raise ValueError(
            f"generate: prompt and answer must fit into the cache of {step.cache.max_length} places, got max_length "
            f"{longest}: ask for fewer new tokens, or capture with a longer cache"
        )
    with torch.no_grad():
        return _loop(step, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs)


def _why_uncaptured(model: Any, step: Step | None, input_ids: Tensor) -> str:
    """Why a captured step cannot serve a request, empty where it can."""
    if step is None:
        return "another batch size"
    if step.logits is not None and step.invariant != is_invariant():
        return "the step was captured " + ("inside invariant()" if step.invariant else "outside invariant()")
    if is_taped(model):
        return "a RoutingTape is at work"
    return "more than text" if step.device != input_ids.device or model.training else ""


def _on_its_way(tokens: Tensor, running: Tensor) -> Callable[[], tuple[Tensor, bool]]:
    """Tokens for the host and whether any sequence goes on: a wait for them, not for what is launched meanwhile."""
    if tokens.device.type != "cuda":
        return lambda: (tokens, bool(running.any()))
    both = torch.cat((tokens, running.any().to(tokens.dtype).view(1)))
    landed = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
    landed.copy_(both, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(tokens.device))

    def wait() -> tuple[Tensor, bool]:
        event.synchronize()
        return landed[:-1], bool(landed[-1])

    return wait


def _loop(
    step: Step, input_ids: Tensor, processors: Any, criteria: Any, config: Any, streamer: Any, model_kwargs: Any
) -> Any:
    from transformers.generation.utils import GenerateDecoderOnlyOutput

    keeps_scores = config.return_dict_in_generate and config.output_scores
    keeps_logits = config.return_dict_in_generate and config.output_logits
    scores: list[Any] = []
    raw: list[Any] = []
    ends = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    pad = config._pad_token_tensor
    running = torch.ones(input_ids.shape[0], dtype=torch.int64, device=input_ids.device)
    places = model_kwargs.get("position_ids")
    logits = step.prefill(input_ids, model_kwargs.get("attention_mask"), places)
    while True:
        wide = logits.to(torch.float32, copy=True)
        chosen_from = processors(input_ids, wide)
        if keeps_scores:
            scores.append(chosen_from)
        if keeps_logits:
            raw.append(wide)
        if config.do_sample:
            tokens = torch.multinomial(chosen_from.softmax(-1), 1).squeeze(1)
        else:
            tokens = chosen_from.argmax(-1)
        if ends:
            tokens = tokens * running + pad * (1 - running)
        input_ids = torch.cat((input_ids, tokens[:, None]), -1)
        running = running & ~criteria(input_ids, tuple(scores) if keeps_scores else None)
        more = step.cache.length < step.cache.max_length
        ahead = more and step.logits is not None
        arrived = _on_its_way(tokens, running)
        if ahead:  # before the host waits for anything; when nothing follows, one step was for nothing
            logits = step(tokens)
        shown, goes_on = arrived()
        if streamer is not None:
            streamer.put(shown)
        if not more or not goes_on:
            break
        if not ahead:
            logits = step(tokens)
    if step.keeps and bool(step.mask.all()):
        step.held = input_ids[:, : step.cache.length]
    if streamer is not None:
        streamer.end()
    if not config.return_dict_in_generate:
        return input_ids
    return GenerateDecoderOnlyOutput(
        sequences=input_ids,  # type: ignore[arg-type]  # integers, of whatever type the prompt has
        scores=tuple(scores) if keeps_scores else None,
        logits=tuple(raw) if keeps_logits else None,
        past_key_values=None,
    )
