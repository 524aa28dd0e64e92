"""A simulator for Metal shaders: the MSL text that ships, compiled as C++ and run thread by thread, faults included.

``compile_shader`` takes what ``torch.mps.compile_shader`` takes and returns what it returns, so a backend launches the
same way here and on a Mac::

    library = msl.compile_shader(source)
    library.name_of_kernel(*args, threads=(x, y, z), group_size=(x, y, z), arg_casts=None)

**The call is torch's.** Argument ``i`` binds at ``[[buffer(i)]]``. A tensor binds its memory from its storage offset. A
Python ``int`` (or ``bool``) is passed as int64, a ``float`` as float32, a list or tuple of either as an array of them;
``arg_casts`` ("int32", or ``{2: "int32"}`` by argument) makes it one of ``fp16 bf16 int32 int16 int8 uint8``;
there are no others, and a cast for all takes floats along, so name the arguments. A ``constant uint&`` takes "int32".
``threads`` is the number of *threads*, not of groups, so the last group may be narrower; ``group_size`` has as many
dimensions as ``threads``. Without ``threads`` the first tensor's numel is taken. torch compiles without fast math, for
Metal 3.1 at least, from ASCII text.

**Stricter than a Mac**, each a ``Fault`` or ``CompileError`` here: a tensor or scalar whose type is not the
parameter's, a missing argument, a group over 1,024 threads, threadgroup memory over 32 KiB, and the faults a GPU keeps
silent about: out of bounds, data races (between barriers, and between threadgroups), reads of uninitialised
threadgroup memory, divergence at barriers and collectives, misaligned vectors, pointers of the wrong address space,
integer division by zero. ``threadgroup_barrier(mem_flags::mem_threadgroup)`` orders threadgroup memory only; nothing
orders device memory between threadgroups of one dispatch.

**How the metal backend takes it in.** ``moefuse.backends.metal.launch`` has the two attributes that ``install`` sets:

* ``compile_shader``: the compiler, ``torch.mps.compile_shader`` by default, called as ``launch.compile_shader(source)``
* ``EMULATED``: False by default; True means processor tensors are served, so ``emulates()`` returns ``("cpu",)`` and
  ``unavailable()`` returns None.

**What a shader may not do here** although Metal allows it: overload functions on the address space alone, keep float3
or other padded types in threadgroup memory, assign to swizzles of two and more letters. ``bfloat(x)`` and vector
conversions are written out; so are address spaces on every pointer and reference, as Metal itself requires.
``language`` lists what shaders may use; the lint runs at every compile, with the macros of that compile.

**How it works.** ``shader`` reads the text, ``translate`` writes C++ of it, ``build`` compiles that against the headers
in ``cpp/`` with the compiler's sanitizers switched on, and ``library`` calls the kernels. The calls that the sanitizers
put before every access to memory end in ``cpp/runtime.cpp``: it keeps a fiber for each thread of a threadgroup, each
buffer in 4 GiB of address space of its own, and for each word who touched it since which barrier. What it cannot show:
speed, what Metal's compiler thinks of the text, how a GPU rounds beyond what the specification promises, a read whose
value is never used (it is optimised away), and races that only other inputs have.
"""

from __future__ import annotations

from moefuse.testing.msl.library import Dispatches, Fault, Library, compile_shader, dispatches, shuffled
from moefuse.testing.msl.shader import CompileError

__all__ = ["CompileError", "Dispatches", "Fault", "Library", "compile_shader", "dispatches", "install", "shuffled"]


def install() -> None:
    """Make the simulator the compiler of the metal backend, which then serves processor tensors."""
    from moefuse.backends.metal import launch
    from moefuse.ops._core import select

    launch.compile_shader = compile_shader
    launch.EMULATED = True
    select.forget()
