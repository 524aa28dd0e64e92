"""Launches taken down once and made again on other tensors, for a few microseconds of Python each.

A run on stand-ins, which have shapes and types but no memory, shows what each launch is given: which of its tensors
begins where in which argument or buffer. Replayed, the launches get addresses instead of tensors, all buffers that are
not results lie in one allocation, and nothing is sorted out anew.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moefuse.backends.triton.runtime.launch import (
    INTERPRETED,
    capturing,
    compiled_for,
    counters_at,
    is_descriptor,
    launch,
    recording,
)

#: between buffers of one allocation; torch's own are no less aligned
_GRAIN = 256
#: in a launch's list of arguments, where the stream goes
_STREAM = object()
_aten: Any = torch.ops.aten
#: what a run may do besides launching and taking views
_ALLOCATIONS = frozenset(
    (
        _aten.empty.memory_format,
        _aten.empty_strided.default,
        _aten.empty_like.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
        torch.ops.prim.device.default,
    )
)


class _Unrecordable(Exception):
    """A run does more than launch kernels on its arguments and on buffers."""


class Piece(NamedTuple):
    """A tensor that a launch takes or a run returns: what of which buffer."""

    buffer: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Described(NamedTuple):
    """A descriptor that a launch takes: of which piece, and all else that it holds."""

    piece: Piece
    kind: Any
    held: dict[str, Any]

    def at(self, address: int) -> Any:
        """The same of a tensor that begins at this address."""
        made = self.kind.__new__(self.kind)
        made.__dict__.update(self.held, base=_Base(address, self.piece.dtype))
        return made


class _Base(NamedTuple):
    """What a launch asks of a descriptor's tensor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]
    #: the compiled kernel and its compile-time arguments; None in the interpreter
    compiled: tuple[Any, tuple[Any, ...]] | None


class _NothingElse(TorchDispatchMode):
    """Refuses whatever a replay would leave out: a copy, a fill, another library's op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func not in _ALLOCATIONS:
            raise _Unrecordable(str(func))
        return func(*args, **(kwargs or {}))


class _Taker:
    """Takes launches down. Buffers are numbered: the counters 0, arguments from 1, then what the run allocates."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self.launches: list[_Launch] = []
        #: how many counters the run asks for
        self.counted = 0
        self.buffers = [
            torch.empty(1, dtype=torch.int32, device=device),
            *(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device) for t in tensors),
        ]
        self.arguments = len(self.buffers)
        # Buffers are kept while recording, so that no storage gets the address of one that is gone.
        self.number = {t.untyped_storage()._cdata: i for i, t in enumerate(self.buffers)}

    def piece(self, t: Tensor) -> Piece:
        storage = t.untyped_storage()
        found = self.number.setdefault(storage._cdata, len(self.buffers))
        if found == len(self.buffers):
            self.buffers.append(t)
        return Piece(found, int(t.storage_offset()) * t.element_size(), tuple(t.shape), t.stride(), t.dtype)

    def take(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        assert not any(isinstance(part, Tensor) for arg in args if isinstance(arg, tuple) for part in arg)
        compiled = None
        if not INTERPRETED:
            compiled = compiled_for(kernel, self.device, args, options)
            if compiled is None:
                self.refuse("a kernel that was never launched so")
        pieces = tuple(map(self._taken, args))
        self.launches.append(_Launch(kernel, grid, pieces, options, compiled))

    def _taken(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self.piece(arg)
        if not is_descriptor(arg):
            return arg
        if INTERPRETED:
            self.refuse("a descriptor")
        return Described(self.piece(arg.base), type(arg), {k: v for k, v in vars(arg).items() if k != "base"})

    def counters(self, count: int) -> Tensor:
        if self.counted:
            self.refuse("two kernels that count")
        self.counted = count
        return self.buffers[0]

    def refuse(self, why: str) -> None:
        raise _Unrecordable(why)

    def result(self, t: Tensor) -> tuple[Piece | None, int | None]:
        """The buffer that is returned and an argument just like it, or only the argument that is returned."""
        made = self.piece(t)
        alike = [
            i
            for i, argument in enumerate(self.buffers[1 : self.arguments])
            if (argument.shape, argument.stride(), argument.dtype) == (t.shape, t.stride(), t.dtype)
        ]
        if made.buffer < self.arguments:
            if made.offset or made.buffer - 1 not in alike:
                self.refuse("a view of an argument is returned")
            return None, made.buffer - 1
        if not t.is_contiguous() or t.numel() * t.element_size() != self.nbytes(made.buffer):
            self.refuse("a part of a buffer is returned")
        return made, alike[0] if alike else None

    def nbytes(self, buffer: int) -> int:
        return self.buffers[buffer].untyped_storage().nbytes()


def record(run: Callable[..., Any], tensors: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    """A function that does what ``run(*tensors)`` does, on tensors laid out like these; None where that is more than
    to launch kernels.

    It takes the tensors that are not None. All are on one device, and begin at multiples of 16 bytes. ``run`` returns
    tensors, in a tuple or alone, or None among them.
    """
    device = next(t for t in tensors if t is not None).device
    return None if why_not(device) is not None else _record(run, tensors)


#: device -> None where a replay gave there what the launches gave, or why not
_PROVED: dict[torch.device, str | None] = {}


@triton.jit
def _probe_kernel(x_ptr, out_ptr, n, added, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 2.0 * tl.load(x_ptr + at, mask=at < n, other=0.0) + added, mask=at < n)


def why_not(device: torch.device) -> str | None:
    """None where launches are replayed, or why they are not.

    Triton's launcher is called by a layout that it does not promise, so a tiny replay is compared once with launches.
    """
    if device not in _PROVED:
        if capturing(device):
            return "it has not been tried yet, and cannot be while a graph is captured"
        reason = _probe(device)
        _PROVED[device] = reason
        if reason is not None:
            logging.getLogger("moefuse").warning("moefuse: triton: replay is off: %s", reason)
    return _PROVED[device]


def _probe(device: torch.device) -> str | None:
    def run(x: Tensor) -> Tensor:
        middle, out = torch.empty_like(x), torch.empty_like(x)
        launch(_probe_kernel, (1,), x, middle, 5, 1.0, BLOCK=16, num_warps=1)
        launch(_probe_kernel, (1,), middle, out, 5, 3.0, BLOCK=16, num_warps=1)
        return out

    try:
        with torch.inference_mode(False), torch.no_grad():
            first, second = (torch.arange(start, start + 5.0, device=device) for start in (0, 7))
            run(first)
            replay = _record(run, [first])
            if replay is None:
                return "a run of two launches could not be taken down"
            if torch.equal(replay([second]), 4 * second + 5):
                return None
    except Exception as error:  # whatever this Triton objects to, ordinary launches serve
        return f"this Triton's launcher is another ({type(error).__name__}: {error})"
    return "a replay gave other numbers than the launches"


def _record(run: Callable[..., Any], tensors: Sequence[Tensor | None]) -> Callable[..., Any] | None:
    given = [t for t in tensors if t is not None]
    device = given[0].device
    with torch.inference_mode(False), FakeTensorMode():
        taker = _Taker(given, device)
        stand_ins = iter(taker.buffers[1:])
        arguments = [None if t is None else next(stand_ins) for t in tensors]
        recording.recorder = taker
        try:
            with _NothingElse():
                results = run(*arguments)
            return (_Interpreted if INTERPRETED else Replay)(taker, results)
        except _Unrecordable:
            return None
        finally:
            recording.recorder = None


class _Layout:
    """Which buffers a replay allocates: each result on its own, the rest in one."""

    def __init__(self, taker: _Taker, results: Any) -> None:
        self.device = taker.device
        self.alone = not isinstance(results, tuple)
        self.arguments = taker.arguments
        self.counted = taker.counted
        #: of a result: the buffer that is returned and an argument to allocate it like, or the argument returned
        self.results = [(None, None) if t is None else taker.result(t) for t in ((results,) if self.alone else results)]
        owned = [buffer.buffer for buffer, _ in self.results if buffer is not None]
        self.place: dict[int, int] = {}
        self.scratch = 0
        for buffer in range(taker.arguments, len(taker.buffers)):
            if buffer not in owned:
                self.place[buffer] = self.scratch
                self.scratch += -(-taker.nbytes(buffer) // _GRAIN) * _GRAIN
        self.owned = {buffer: i for i, buffer in enumerate(owned)}

    def allocate(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
        """Fresh results, and everything to return."""
        fresh: list[Tensor] = []
        returned: list[Any] = []
        for result, like in self.results:
            if result is not None:
                # An argument of the same shape at hand saves sorting the shape out: 1.2 against 2.2 us.
                made = (
                    torch.empty(result.shape, dtype=result.dtype, device=self.device)
                    if like is None
                    else torch.empty_like(tensors[like])
                )
                fresh.append(made)
                returned.append(made)
            else:
                returned.append(None if like is None else tensors[like])
        return fresh, returned


class _Interpreted(_Layout):
    """A replay in Triton's interpreter, which takes no addresses: the same layout, through tensors."""

    def __init__(self, taker: _Taker, results: Any) -> None:
        super().__init__(taker, results)
        self.launches = taker.launches

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        fresh, returned = self.allocate(tensors)
        scratch = torch.empty(self.scratch, dtype=torch.uint8, device=self.device)
        counters = counters_at(self.device, 0, scratch.data_ptr(), self.counted)

        def tensor(piece: Piece) -> Tensor:
            if piece.buffer in self.place:
                whole = scratch[self.place[piece.buffer] :].view(piece.dtype)
            elif piece.buffer in self.owned:
                whole = fresh[self.owned[piece.buffer]]
            else:
                whole = tensors[piece.buffer - 1] if piece.buffer else counters
            start = whole.storage_offset() + piece.offset // piece.dtype.itemsize
            return whole.as_strided(piece.shape, piece.stride, start)

        for step in self.launches:
            args = (tensor(arg) if isinstance(arg, Piece) else arg for arg in step.args)
            launch(step.kernel, step.grid, *args, **step.options)
        return returned[0] if self.alone else tuple(returned)


def _launcher(compiled: Any) -> tuple[Any, tuple[Any, ...]]:
    """What launches a kernel, and what that takes between the kernel and its metadata.

    Triton's launcher is Python around a function of C: 1.5 us, which a kernel without scratch memory need not pay.
    """
    run = compiled.run
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1) or not hasattr(run, "launch"):
        return run, ()
    return run.launch, (run.launch_cooperative_grid, run.launch_pdl, None, None)


class Replay(_Layout):
    """A replay on a GPU. Every launch picks its arguments out of one list: what changes first, then what never does."""

    def __init__(self, taker: _Taker, results: Any) -> None:
        super().__init__(taker, results)
        # Buffers as a call numbers them: counters, arguments, fresh results, scratch.
        last = self.arguments + len(self.owned)
        where = {buffer: (last, start) for buffer, start in self.place.items()}
        where |= {buffer: (self.arguments + i, 0) for buffer, i in self.owned.items()}

        def pointer(piece: Piece) -> tuple[int, int]:
            buffer, start = where.get(piece.buffer, (piece.buffer, 0))
            return buffer, start + piece.offset

        given = [arg for step in taker.launches for arg in step.args]
        inside = dict.fromkeys(pointer(arg) for arg in given if isinstance(arg, Piece))
        #: addresses that are not the beginning of a buffer
        self.pointers = [place for place in inside if place[1]]
        #: descriptors, with buffer and offset
        self.described = [(arg, *pointer(arg.piece)) for arg in given if isinstance(arg, Described)]
        described = iter(range(last + 2 + len(self.pointers), last + 2 + len(self.pointers) + len(self.described)))
        # What a launch picks from: the stream, where buffers begin, these addresses, descriptors, what never changes.
        changing = last + 2 + len(self.pointers) + len(self.described)
        self.constants: list[Any] = []
        #: the launcher and its arguments; and as Triton itself launches, with the kernel's own arguments
        self.launches: list[tuple[Any, Any, Any, Any]] = []
        for step in taker.launches:
            assert step.compiled is not None
            compiled, compile_time = step.compiled
            grid = (*step.grid, 1, 1)[:3]
            run, between = _launcher(compiled)
            before = (*grid, _STREAM, compiled.function, *between, compiled.packed_metadata, None, None, None)
            picks = []
            for arg in (*before, *step.args, *compile_time):
                if arg is _STREAM:
                    picks.append(0)
                elif isinstance(arg, Piece):
                    buffer, offset = pointer(arg)
                    picks.append(last + 2 + self.pointers.index((buffer, offset)) if offset else 1 + buffer)
                elif isinstance(arg, Described):
                    picks.append(next(described))
                else:
                    picks.append(changing + len(self.constants))
                    self.constants.append(arg)
            own = operator.itemgetter(*picks[len(before) :])
            self.launches.append((run, operator.itemgetter(*picks), compiled[grid], own))
        self.empty: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        device = self.device
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(tensors)
        if self.empty is None:
            self.empty = torch.empty(0, dtype=torch.uint8, device=device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        fresh, returned = self.allocate(tensors)
        # Freed when this returns: the allocator hands it out again only to what this stream does later.
        scratch = self.empty.new_empty(self.scratch)
        begin = scratch.data_ptr()
        counters = counters_at(device, stream, begin, self.counted) if self.counted else scratch
        bases = [counters.data_ptr(), *[t.data_ptr() for t in (*tensors, *fresh)], begin]
        pointers = [bases[buffer] + offset for buffer, offset in self.pointers]
        described = [each.at(bases[buffer] + offset) for each, buffer, offset in self.described]
        values = [stream, *bases, *pointers, *described, *self.constants]
        hooks = triton.knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            for _, _, observed, own in self.launches:
                observed(*own(values), stream=stream)
        else:
            for run, pick, _, _ in self.launches:
                run(*pick(values))
        return returned[0] if self.alone else tuple(returned)
