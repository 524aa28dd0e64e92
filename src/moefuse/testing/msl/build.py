"""Compile shaders and the runtime with the machine's C++ compiler, and keep what was compiled."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from moefuse import config
from moefuse.testing.msl.shader import CompileError

CPP = Path(__file__).parent / "cpp"
#: shaders may rely on what torch asks of every Mac it runs on: Metal 3.1, which has bfloat
MACROS = ("-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__METAL_MACOS__=1", "-D__HAVE_BFLOAT__=1")
_HEADERS = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<metal_\w+>[ \t]*$", re.MULTILINE)
_BASE = ("-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-fno-strict-aliasing")
#: Metal 3 is C++14, which our own headers, included as the system's, need not be;
#: the sanitizers' calls are answered by our runtime; variables without a value get a conspicuous one
_INSTRUMENTED = (
    *_BASE,
    "-std=c++14",
    "-pedantic-errors",
    "-Werror=uninitialized",
    "-O1",
    "-g1",
    "-fsanitize=thread,bounds,alignment,null,integer-divide-by-zero",
    "-fno-sanitize-recover=all",
    "-ftrivial-auto-var-init=pattern",
)


def preprocess(source: str) -> str:
    """The shader with its macros expanded and Metal's own headers left out."""
    done = _run([config.cxx(), "-E", "-undef", "-x", "c++", *MACROS, "-"], _HEADERS.sub("", source))
    if done.returncode:
        raise CompileError(_readable(done.stderr.replace("<stdin>", "shader.metal"), source))
    # Markers as the standard has them; those of line 0 name no place.
    markers = re.compile(r'^# (\d+) "([^"]*)".*$', re.MULTILINE)
    return markers.sub(
        lambda found: f'#line {found[1]} "{found[2].replace("<stdin>", "shader.metal")}"' if found[1] != "0" else "",
        done.stdout,
    )


def _run(command: Sequence[str], source: str | None = None) -> subprocess.CompletedProcess[str]:
    if shutil.which(command[0]) is None:
        raise CompileError(f"the simulator needs a C++ compiler, and {command[0]} is not there (set CXX)")
    # Messages are read, so they come in plain English.
    return subprocess.run(["env", "LC_ALL=C", *command], input=source, capture_output=True, text=True, check=False)


@functools.cache
def _toolchain() -> str:
    """Compiler and headers: what was compiled with others is compiled again."""
    state = hashlib.sha256(_run([config.cxx(), "--version"]).stdout.encode())
    for path in sorted(CPP.iterdir()):
        state.update(path.read_bytes())
    return state.hexdigest()


@functools.cache
def _cache() -> Path:
    """Where libraries are kept: the user's cache, or for this process alone where that cannot be written."""
    home = config.cache() / "msl"
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="moefuse-msl-"))
    _refuse_foreign(home)
    return home


def _refuse_foreign(path: Path) -> None:
    """What lies in the cache is loaded and run, so nobody else may have put it there."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"the simulator runs what it finds in its cache, so {path} must be yours and writable by nobody else: "
            "remove it, or set MOEFUSE_CACHE to a folder of your own"
        )


def _built(name: str, key: str, build: Callable[[Path], None]) -> Path:
    """The library ``key`` stands for, from the cache or made by ``build(target)``."""
    target = _cache() / f"{name}-{hashlib.sha256(f'{_toolchain()}{key}'.encode()).hexdigest()[:24]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            made = Path(scratch) / target.name
            build(made)
            made.chmod(0o700)
            os.replace(made, target)
    _refuse_foreign(target)
    return target


def _checked(command: Sequence[str], shader: str | None = None) -> None:
    done = _run(command)
    if done.returncode:
        raise CompileError(_readable(done.stderr, shader) if shader else done.stderr)


def _readable(errors: str, shader: str) -> str:
    """The compiler's first errors, each with its line of Metal; an error in our headers has the line that led there."""
    lines = shader.split("\n")
    found, led = [], 0
    for row in errors.split("\n"):
        if at := re.match(r"shader\.metal:(\d+):\d+:", row):
            led = int(at.group(1))
        if led and (message := re.search(r"error: (.*)", row)):
            found.append(f"line {led}: {message.group(1)}\n    {lines[led - 1].strip() if led <= len(lines) else ''}")
    return "\n".join(found[:8]) or errors


@functools.cache
def runtime() -> Path:
    """The library of the simulated GPU."""

    def build(target: Path) -> None:
        _checked(
            [config.cxx(), *_BASE, "-std=c++17", "-O2", "-shared", str(CPP / "runtime.cpp"), "-o", str(target), "-ldl"]
        )

    return _built("runtime", "", build)


def shader(cpp: str, source: str) -> Path:
    """The library of a translated shader; errors speak of ``source``."""

    def build(target: Path) -> None:
        unit, made = target.with_suffix(".cpp"), target.with_suffix(".o")
        unit.write_text(cpp)
        _checked([config.cxx(), *_INSTRUMENTED, "-isystem", str(CPP), "-c", str(unit), "-o", str(made)], source)
        # Linked apart: at this point the compiler would bring its own sanitizer.
        _checked([config.cxx(), "-shared", "-Wl,-Bsymbolic", str(made), str(runtime()), "-o", str(target), "-lm"])

    return _built("shader", cpp + " ".join(_INSTRUMENTED), build)


def line_at(library: Path, offset: int) -> int | None:
    """The line of Metal at an address in a shader's library, as the debug information has it."""
    tool = shutil.which("addr2line")
    if tool is None:
        return None
    # Inlined calls come innermost first: the first one in the shader is the access.
    found = re.search(r"shader\.metal:(\d+)", _run([tool, "-i", "-e", str(library), hex(offset)]).stdout)
    return int(found.group(1)) if found else None
