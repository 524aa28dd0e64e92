"""Which experts every token went to, taken down in one run and replayed in another."""

from __future__ import annotations

import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from moefuse.ops._core.arithmetic import widen
from moefuse.ops._core.checks import check_count, check_instance
from moefuse.ops._core.invariance import is_invariant
from moefuse.ops.gate import gate
from moefuse.ops.linear import linear
from moefuse.ops.route import weights_at
from moefuse.types import MAX_EXPERTS, Router, Routing, check_flag

_FORMAT = 1


@dataclass
class Track:
    """One layer of a tape: experts ``[N, top_k]`` of its tokens in order, ``num_experts`` for none, and how many tokens
    each call had."""

    num_experts: int
    ids: Tensor
    weights: Tensor | None = None
    lengths: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]


def _small(ids: Tensor, num_experts: int) -> Tensor:
    """Ids in few bytes, those that are no expert as ``num_experts``."""
    known = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    return known.to(torch.uint8 if num_experts < 256 else torch.int16)


def _in_backward() -> bool:
    """Whether a backward pass is under way: what runs then is run again, for a checkpoint."""
    running: int = torch._C._current_graph_task_id()
    return running != -1


class Recorder:
    """Takes down one layer's calls."""

    def __init__(self, num_experts: int, with_weights: bool) -> None:
        self.num_experts, self._with_weights = num_experts, with_weights
        self._ids: list[Tensor] = []
        self._weights: list[Tensor] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    @torch.no_grad()
    def record(self, ids: Tensor, weights: Tensor) -> None:
        """A call's experts ``[T, top_k]`` and their weights; where they are, without waiting for them."""
        _refuse_graphs(ids)
        if _in_backward():
            return
        self._ids.append(_small(ids, self.num_experts))
        if self._with_weights:
            self._weights.append(weights.detach().to(torch.float32, copy=True))

    def made(self) -> Track | None:
        """All that was taken down, on the host; None where the layer was never called."""
        if not self._ids:
            return None
        weights = torch.cat([w.cpu() for w in self._weights]) if self._with_weights else None
        ids = torch.cat([t.cpu() for t in self._ids])
        return Track(self.num_experts, ids, weights, [t.shape[0] for t in self._ids])


class Player:
    """Gives one layer's calls what was taken down: tokens in the same order, cut into calls in any way."""

    def __init__(self, name: str, track: Track, with_weights: bool) -> None:
        self.name, self.track, self.with_weights = name, track, with_weights
        self._at = 0
        self._taken: list[tuple[int, int]] = []  # calls whose backward pass may run them again

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def next(self, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Ids int32 ``[T, top_k]``, and weights where they are to be replayed, for the next rows ``like``."""
        _refuse_graphs(like)
        T = like.shape[0]
        start, stop = self._again(T) if _in_backward() else self._on(T)
        ids = self.track.ids[start:stop].to(like.device, torch.int32)
        weights = self.track.weights
        return ids, weights[start:stop].to(like.device) if self.with_weights and weights is not None else None

    def _on(self, T: int) -> tuple[int, int]:
        start, stop = self._at, self._at + T
        if stop > self.track.tokens:
            raise ValueError(
                f"RoutingTape: {self.name} must be given the {self.track.tokens} tokens of the tape, got {stop}"
            )
        self._at = stop
        self._taken.append((start, stop))
        return start, stop

    def _again(self, T: int) -> tuple[int, int]:
        """What a checkpoint runs again: a backward pass goes through calls from the last to the first."""
        for place in reversed(range(len(self._taken))):
            start, stop = self._taken[place]
            if stop - start == T:
                return self._taken.pop(place)
        raise ValueError(f"RoutingTape: {self.name} must be run again on a batch that was replayed, got {T} tokens")

    def check_end(self) -> None:
        if self._at != self.track.tokens:
            raise ValueError(
                f"RoutingTape: {self.name} must be given the {self.track.tokens} tokens of the tape, got {self._at}"
            )


def _refuse_graphs(t: Tensor) -> None:
    if t.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("RoutingTape: a CUDA graph is being captured, whose replays no tape would see")


Tape = Recorder | Player


class Routed(Protocol):
    """A layer whose routing a tape can take down and replay."""

    num_experts: int
    #: None where only a call tells
    top_k: int | None

    def attach(self, tape: Tape) -> None:
        """Give it to the layer; raises ValueError where the layer cannot follow it."""

    def detach(self) -> None: ...


class _OfMoE:
    """A `moefuse.nn.MoE`."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.num_experts, self.top_k = layer.router.shape[0], layer.routing.top_k

    def attach(self, tape: Tape) -> None:
        self.layer._routing_tape = tape

    def detach(self) -> None:
        self.layer._routing_tape = None


def _modules(model: nn.Module) -> Iterator[tuple[str, Routed]]:
    from moefuse.nn.moe import MoE

    return ((name, _OfMoE(layer)) for name, layer in model.named_modules() if isinstance(layer, MoE))


#: who finds layers in a model: ours here, those of transformers once `moefuse.hf` is imported
FINDERS: list[Callable[[nn.Module], Iterable[tuple[str, Routed]]]] = [_modules]


def is_taped(model: nn.Module) -> bool:
    """Whether a tape is at work on a model."""
    return any(getattr(module, "_routing_tape", None) is not None for module in model.modules())


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    """``[T, E]`` in the type of x, float32 or wider, where someone must see them: `moefuse.gate` keeps its own."""
    if is_invariant():
        return linear(x, widen(weight), bias=None if bias is None else widen(bias), backend=backend)
    logits = x @ widen(weight).T
    return logits if bias is None else logits + widen(bias)


def routed(
    tape: Tape, rows: Tensor, router: Router, routing: Routing, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, ids and normed rows as `moefuse.gate` gives them, taken down or by what was taken down.

    A replayed row whose experts are those that the router chooses has the router's very weights.
    """
    weight, norm_weight, bias, logit_bias, per_expert_scale, eps = router
    options: dict[str, Any] = {"norm_weight": norm_weight, "eps": eps, "bias": bias, "logit_bias": logit_bias}
    options |= {"per_expert_scale": per_expert_scale, "return_normed": True, "backend": backend}
    weights, ids, normed = gate(rows, weight, routing, **options)
    if isinstance(tape, Recorder):
        tape.record(ids, weights)
        return weights, ids, normed
    replayed, given = tape.next(rows)
    if given is not None:
        return given, replayed, normed
    x = widen(rows)
    if norm_weight is not None:
        x = rms_norm(x, x.shape[-1:], widen(norm_weight), eps)
    logits = router_logits(x, weight, logit_bias, backend)
    anew = weights_at(logits, replayed, routing, per_expert_scale)
    return torch.where((replayed == ids).all(-1, keepdim=True), weights, anew), replayed, normed


class RoutingTape:
    """Which experts every token went to in each layer: taken down in one run, replayed in another.

    Reinforcement learning draws tokens in one run and learns from them in another. Where the two choose other experts
    for a token, its probability jumps; a replay makes them the same. Weights are computed anew from the router's
    scores of the replayed experts, so gradients reach the router; or replayed, too, and then none do.

    Layers are those of `moefuse.nn.MoE`, and once `moefuse.hf` is imported those of transformers' models: patched, or
    with ``experts_implementation="moefuse"``. A tape names them by their paths; a model that another wraps has the
    same layers. Tokens are replayed in the order in which they were taken down, cut into calls in any way, and all of
    them. Gradient checkpointing is known; a captured step is not used while a tape is at work.

    Args:
        weights: take the experts' weights down, too.

    >>> from moefuse import Routing
    >>> from moefuse.nn import MoE
    >>> layer, x = MoE(64, 32, 8, Routing(top_k=2)), torch.randn(10, 64)
    >>> tape = RoutingTape()
    >>> with tape.record(layer):
    ...     y = layer(x)
    >>> with tape.replay(layer):
    ...     same = torch.equal(layer(x[:4]), y[:4]) and torch.equal(layer(x[4:]), y[4:])
    >>> same, tape
    (True, RoutingTape(1 layer, 10 tokens, top-2 of 8 experts))
    """

    def __init__(self, *, weights: bool = False) -> None:
        check_flag("RoutingTape", "weights", weights)
        self._with_weights = weights
        self._tracks: dict[str, Track] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        """The paths of the layers on the tape."""
        return tuple(self._tracks)

    def ids(self, layer: str) -> Tensor:
        """``[N, top_k]`` int32, on the host: experts of a layer's tokens in order; the number of experts for none."""
        return self._track(layer).ids.to(torch.int32)

    def weights(self, layer: str) -> Tensor:
        """``[N, top_k]`` float32, where weights were taken down."""
        found = self._track(layer).weights
        if found is None:
            raise ValueError("RoutingTape.weights: the tape must have been made with weights=True, got one without")
        return found

    def _track(self, layer: str) -> Track:
        if layer not in self._tracks:
            raise ValueError(f"RoutingTape: layer must be one of {', '.join(self._tracks) or 'none'}, got {layer!r}")
        return self._tracks[layer]

    def add(self, layer: str, ids: Tensor, num_experts: int, weights: Tensor | None = None) -> None:
        """Append a call's tokens to a layer, as another engine has routed them.

        Args:
            layer: its path in the model.
            ids: ``[T, top_k]`` of any integer type.
            num_experts: ``E``.
            weights: ``[T, top_k]``, for a tape with weights.
        """
        check_instance("RoutingTape.add", "layer", layer, str)
        check_instance("RoutingTape.add", "ids", ids, Tensor)
        check_count("RoutingTape.add", "num_experts", num_experts, 1)
        if num_experts > MAX_EXPERTS:
            raise ValueError(f"RoutingTape.add: num_experts must be at most {MAX_EXPERTS}, got {num_experts}")
        if ids.dim() != 2 or ids.shape[1] < 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(f"RoutingTape.add: ids must be integers [T, top_k], got {ids.dtype} {list(ids.shape)}")
        if self._with_weights != (weights is not None):
            wanted = "weights" if self._with_weights else "no weights"
            raise ValueError(f"RoutingTape.add: a tape made with weights={self._with_weights} must be given {wanted}")
        if weights is not None and weights.shape != ids.shape:
            raise ValueError(f"RoutingTape.add: weights must be {list(ids.shape)} like ids, got {list(weights.shape)}")
        recorder = Recorder(num_experts, self._with_weights)
        recorder.record(ids.to(torch.int64), ids if weights is None else weights)
        self._append(layer, recorder.made())

    def _append(self, layer: str, made: Track | None) -> None:
        if made is None:
            return
        held = self._tracks.get(layer)
        if held is None:
            self._tracks[layer] = made
            return
        if (held.num_experts, held.top_k) != (made.num_experts, made.top_k):
            kept, got = (f"top-{t.top_k} of {t.num_experts} experts" for t in (held, made))
            raise ValueError(f"RoutingTape: {layer} must have {kept} as on the tape, got {got}")
        both = None
        if held.weights is not None and made.weights is not None:
            both = torch.cat((held.weights, made.weights))
        lengths = held.lengths + made.lengths
        self._tracks[layer] = Track(held.num_experts, torch.cat((held.ids, made.ids)), both, lengths)

    @contextmanager
    def record(self, model: nn.Module) -> Iterator[None]:
        """Inside, every call of the model's layers is appended to the tape."""
        found = _layers_of("record", model)
        recorders = {name: Recorder(layer.num_experts, self._with_weights) for name, layer in found.items()}
        with _attached(found, recorders):
            yield
        for name, recorder in recorders.items():
            self._append(name, recorder.made())

    @contextmanager
    def replay(self, model: nn.Module, *, weights: bool = False) -> Iterator[None]:
        """Inside, the model's layers send each token to the experts on the tape.

        Args:
            model: with as many layers, experts and experts per token as the tape has.
            weights: replay the weights, too, instead of computing them from the router's scores.

        Leaving it raises ValueError where a layer was not given all the tokens of the tape.
        """
        check_flag("RoutingTape.replay", "weights", weights)
        if weights and not self._with_weights:
            raise ValueError("RoutingTape.replay: weights must have been taken down, got a tape without")
        found = _layers_of("replay", model)
        tracks = self._tracks_for(list(found))
        for name, layer in found.items():
            track = tracks[name]
            top_k = track.top_k if layer.top_k is None else layer.top_k
            if (track.num_experts, track.top_k) != (layer.num_experts, top_k):
                taped = f"top-{track.top_k} of {track.num_experts}"
                raise ValueError(
                    f"RoutingTape.replay: {name} must have {taped} experts as on the tape, got top-{top_k} of "
                    f"{layer.num_experts}"
                )
        players = {name: Player(name, tracks[name], weights) for name in found}
        with _attached(found, players):
            yield
        for player in players.values():
            player.check_end()

    def _tracks_for(self, names: list[str]) -> dict[str, Track]:
        """The tracks of a model's layers by its own names: those of the tape, but for what wraps either model."""
        if not self._tracks:
            raise ValueError("RoutingTape.replay: the tape must have layers, got an empty one")
        theirs, taped = (_without_wrapper(some) for some in (names, list(self._tracks)))
        if set(theirs) != set(taped):
            missing = sorted(set(taped) - set(theirs)) or sorted(set(theirs) - set(taped))
            whose = "the model" if set(taped) - set(theirs) else "the tape"
            raise ValueError(
                f"RoutingTape.replay: the model must have the {len(taped)} layers of the tape, got {len(names)}; "
                f"{whose} lacks {', '.join(missing[:3])}"
            )
        return {name: self._tracks[taped[short]] for short, name in theirs.items()}

    def sequences(self, batch: int) -> RoutingTape:
        """The tape of the same tokens, sequence by sequence: what ``generate`` did in steps, as one forward has it.

        Each call must have been of ``batch`` sequences: a prompt ``[batch, S]`` and then steps of a token each become
        ``[batch, S + steps]``. The last token that was drawn went through no layer: replay on ``tokens[:, :-1]``.
        """
        check_count("RoutingTape.sequences", "batch", batch, 1)
        turned = RoutingTape(weights=self._with_weights)
        for name, track in self._tracks.items():
            odd = [length for length in track.lengths if length % batch]
            if odd:
                raise ValueError(
                    f"RoutingTape.sequences: every call must have tokens of {batch} sequences, got {odd[0]} in {name}"
                )

            def by_sequence(t: Tensor, lengths: list[int] = track.lengths) -> Tensor:
                parts = [part.view(batch, -1, part.shape[1]) for part in torch.split(t, lengths) if part.shape[0]]
                return torch.cat(parts, 1).flatten(0, 1) if parts else t

            weights = None if track.weights is None else by_sequence(track.weights)
            turned._tracks[name] = Track(track.num_experts, by_sequence(track.ids), weights, [track.tokens])
        return turned

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the tape to a file of plain arrays (NumPy's ``.npz``): a byte for each id of a layer that has none over
        255, two otherwise."""
        layers = [
            {"name": name, "num_experts": track.num_experts, "lengths": track.lengths}
            for name, track in self._tracks.items()
        ]
        about = json.dumps({"moefuse routing tape": _FORMAT, "weights": self._with_weights, "layers": layers})
        arrays = {"about": numpy.frombuffer(about.encode(), dtype=numpy.uint8)}
        for number, track in enumerate(self._tracks.values()):
            fits = track.tokens == 0 or int(track.ids.max()) < 256
            arrays[f"ids_{number}"] = track.ids.to(torch.uint8 if fits else torch.int16).numpy()
            if track.weights is not None:
                arrays[f"weights_{number}"] = track.weights.numpy()
        with open(path, "wb") as file:  # as it is named, with no ending put behind it
            numpy.savez(file, **arrays)  # type: ignore[arg-type]  # its stub takes the names for options

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RoutingTape:
        """A tape that `save` wrote. Nothing in the file is run; one that is no tape raises ValueError."""
        try:
            with open(path, "rb") as file:
                if not zipfile.is_zipfile(file):
                    raise ValueError("it must be an archive of arrays, as save writes it")
            with numpy.load(path, allow_pickle=False) as arrays:
                about = json.loads(bytes(arrays["about"]))
                if about["moefuse routing tape"] != _FORMAT:
                    raise ValueError(f"its format must be {_FORMAT}, got {about['moefuse routing tape']}")
                tape = cls(weights=about["weights"])
                for number, layer in enumerate(about["layers"]):
                    ids = torch.from_numpy(arrays[f"ids_{number}"])
                    weights = torch.from_numpy(arrays[f"weights_{number}"]) if tape._with_weights else None
                    tape._load(layer["name"], ids, layer["num_experts"], weights, layer["lengths"])
        except (ValueError, KeyError, TypeError, AttributeError, EOFError, MemoryError, zipfile.BadZipFile) as error:
            raise ValueError(f"RoutingTape.load: {os.fspath(path)} is no tape: {error}") from error
        return tape

    def _load(self, name: Any, ids: Tensor, num_experts: Any, weights: Tensor | None, lengths: Any) -> None:
        self.add(name, ids, num_experts, weights)
        track = self._tracks[name]
        if not all(type(n) is int and n >= 0 for n in lengths) or sum(lengths) != track.tokens:
            raise ValueError(f"{name} must have calls of {track.tokens} tokens together, got {lengths}")
        track.lengths = lengths

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RoutingTape):
            return NotImplemented
        if (self._with_weights, self.layers) != (other._with_weights, other.layers):
            return False
        pairs = [(self._tracks[name], other._tracks[name]) for name in self.layers]
        return all(
            a.num_experts == b.num_experts
            and a.lengths == b.lengths
            and torch.equal(a.ids, b.ids)
            and (a.weights is None or b.weights is None or torch.equal(a.weights, b.weights))
            for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        if not self._tracks:
            return "RoutingTape(empty)"
        first, count = next(iter(self._tracks.values())), len(self._tracks)
        of = f"top-{first.top_k} of {first.num_experts} experts{', with weights' if self._with_weights else ''}"
        return f"RoutingTape({count} layer{'s' * (count != 1)}, {first.tokens} tokens, {of})"


def _layers_of(doing: str, model: Any) -> dict[str, Routed]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"RoutingTape.{doing}: model must be a torch module, got {type(model).__name__}")
    found = {name: layer for find in FINDERS for name, layer in find(model)}
    if not found:
        raise ValueError(
            f"RoutingTape.{doing}: the model must have a moefuse.nn.MoE, or experts of transformers that run on "
            f"moefuse (import moefuse.hf), got {type(model).__name__}"
        )
    if is_taped(model):
        raise ValueError(f"RoutingTape.{doing}: one tape must be at work on a model at a time, got another")
    return found


@contextmanager
def _attached(layers: dict[str, Routed], tapes: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, layer in layers.items():
            stack.callback(layer.detach)
            layer.attach(tapes[name])
        yield


def _without_wrapper(names: list[str]) -> dict[str, str]:
    """Names without the path that all of them begin with, and what they were."""
    parts = [name.split(".") for name in names]
    same = sum(1 for _ in itertools.takewhile(lambda level: len(set(level)) == 1, zip(*parts, strict=False)))
    return {".".join(part[same:]): name for part, name in zip(parts, names, strict=True)}
