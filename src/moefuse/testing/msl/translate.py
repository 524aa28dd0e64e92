"""From Metal's text to C++: address spaces, kernels, threadgroup memory, literals and swizzles, token by token.

The preprocessor has run already, so macros are gone and line markers say where each token stood. What is left of Metal
beyond C++ is small. ``device`` and ``thread`` vanish, ``constant`` is ``const``: which memory a pointer points into is
known when it is used. An array of ``threadgroup`` memory becomes a reference to storage that the group shares. Kernels
are listed at the end, with the role of every parameter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SPACES = {"device": "d", "constant": "c", "threadgroup": "t", "thread": "p"}

#: attribute of a kernel parameter -> how many numbers it has
ATTRIBUTES = {
    "thread_position_in_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threads_per_grid": 3,
    "threads_per_threadgroup": 3,
    "threadgroups_per_grid": 3,
    "dispatch_threads_per_threadgroup": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "simdgroup_index_in_threadgroup": 1,
    "threads_per_simdgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "thread_index_in_quadgroup": 1,
    "quadgroup_index_in_threadgroup": 1,
}
SCALARS = ("bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
FIXED = (*(f"{sign}int{bits}_t" for bits in (8, 16, 32, 64) for sign in ("", "u")), "size_t", "ptrdiff_t")
VECTORS = [f"{p}{s}{n}" for s in SCALARS for n in (2, 3, 4) for p in ("", "packed_")]
OTHER_TYPES = ["void", "atomic_int", "atomic_uint", "atomic_float", "atomic_bool"]

MAX_THREADS = 1024

_TOKEN = re.compile(
    r"""(?P<marker>^[ \t]*\#[^\n]*)
      | (?P<space>\s+)
      | (?P<number>(?:0[xX][0-9a-fA-F.]+(?:[pP][+-]?\d+)?|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)[a-zA-Z]*)
      | (?P<name>[A-Za-z_]\w*)
      | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
      | (?P<sign>::|->|\+\+|--|<<=|>>=|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.MULTILINE,
)
_MARKER = re.compile(r"#line (\d+)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class CompileError(Exception):
    """The shader is not Metal, or not the part of Metal that runs here. The message names the line."""


@dataclass
class Token:
    kind: str
    text: str
    line: int
    #: what stands for it in the C++
    out: str = ""

    def __post_init__(self) -> None:
        self.out = self.text


@dataclass(frozen=True)
class Parameter:
    name: str
    space: str | None
    indirect: bool
    attribute: str | None
    argument: str | None
    line: int


@dataclass
class Function:
    name: str
    line: int
    is_kernel: bool
    is_template: bool
    is_constexpr: bool
    parameters: list[Parameter]
    #: threads of a group, as [[max_total_threads_per_threadgroup]] limits them
    max_threads: int
    #: tokens of the body, braces included
    body: tuple[int, int]


@dataclass
class Translation:
    cpp: str
    #: name for the host -> the C++ function
    kernels: dict[str, str] = field(default_factory=dict)
    functions: list[Function] = field(default_factory=list)


def tokenize(text: str) -> list[Token]:
    """Every character of ``text`` in order, lines as the markers count them."""
    tokens, line = [], 1
    for match in _TOKEN.finditer(text):
        kind, piece = str(match.lastgroup), match.group()
        tokens.append(Token(kind, piece, line))
        if kind == "marker" and (marker := _MARKER.match(piece.strip())):
            line = int(marker.group(1)) - 1
        line += piece.count("\n")
    return tokens


class Translator:
    def __init__(self, preprocessed: str) -> None:
        self.tokens = tokenize(preprocessed)
        #: positions of the tokens that mean something
        self.solid = [i for i, token in enumerate(self.tokens) if token.kind not in ("space", "marker")]
        self.match: dict[int, int] = {}
        self.attributes: dict[int, list[tuple[str, str | None]]] = {}
        self.functions: list[Function] = []
        self.instances: list[tuple[str, str, str]] = []
        self.types = {*SCALARS, *FIXED, *VECTORS, *OTHER_TYPES}
        self.casts_threadgroup = False

    # Positions below count solid tokens.
    def at(self, i: int) -> Token:
        return self.tokens[self.solid[i]] if 0 <= i < len(self.solid) else Token("end", "", 0)

    def text(self, i: int) -> str:
        return self.at(i).text

    def error(self, i: int, what: str) -> CompileError:
        return CompileError(f"line {self.at(i).line}: {what}")

    def parse(self) -> Translator:
        """Find brackets, attributes, types and functions; nothing is changed."""
        self.pair_brackets()
        self.take_attributes()
        self.find_types()
        self.find_functions(0, len(self.solid))
        return self

    def run(self) -> Translation:
        """After ``parse``: the C++."""
        self.casts_threadgroup = any(
            self.text(i) == "threadgroup" and self.text(i - 1) in ("(", "<") and not self.in_parameters(i)
            for i in range(len(self.solid))
        )
        for function in self.functions:
            self.threadgroup_memory(function)
            self.check_arguments(function)
        self.forbid_bare_pointers()
        for i in range(len(self.solid)):
            self.rewrite(i)
        kernels = self.kernels()
        body = "".join(token.out for token in self.tokens)
        cpp = f'#include "metal_stdlib"\n#line 1 "shader.metal"\n{body}\n{self.listing(kernels)}'
        return Translation(cpp, {name: function for name, (function, _) in kernels.items()}, self.functions)

    def pair_brackets(self) -> None:
        open_at: list[int] = []
        for i in range(len(self.solid)):
            sign = self.text(i) if self.at(i).kind == "sign" else ""
            if sign in _CLOSING:
                open_at.append(i)
            elif sign in _CLOSING.values():
                if not open_at or _CLOSING[self.text(open_at[-1])] != sign:
                    raise self.error(i, f"'{sign}' closes nothing")
                start = open_at.pop()
                self.match[start], self.match[i] = i, start
        if open_at:
            raise self.error(open_at[-1], f"'{self.text(open_at[-1])}' is never closed")

    def take_attributes(self) -> None:
        """``[[name(argument)]]`` is noted at its place and taken out."""
        gone = set()
        for i in range(len(self.solid) - 1):
            if self.text(i) != "[" or self.text(i + 1) != "[" or self.solid[i + 1] != self.solid[i] + 1:
                continue
            end = self.match[i]
            found, j = [], i + 2
            while j < end - 1:
                argument = None
                name = self.text(j)
                while self.text(j + 1) == "::":
                    name, j = f"{name}::{self.text(j + 2)}", j + 2
                if self.text(j + 1) == "(":
                    close = self.match[j + 1]
                    argument = "".join(self.text(k) for k in range(j + 2, close))
                    j = close
                found.append((name, argument))
                j += 2
            before = i - 1
            while before in gone:
                before -= 1
            self.attributes.setdefault(self.solid[before] if before >= 0 else -1, []).extend(found)
            for k in range(i, end + 1):
                gone.add(k)
                self.at(k).out = ""
        old = self.solid
        self.solid = [position for k, position in enumerate(old) if k not in gone]
        self.match = {}
        self.pair_brackets()

    def attributes_of(self, start: int, end: int) -> list[tuple[str, str | None]]:
        return [found for k in range(start, end) for found in self.attributes.get(self.solid[k], [])]

    def find_types(self) -> None:
        for i in range(len(self.solid)):
            if self.text(i) in ("struct", "class", "union", "typename", "enum") and self.at(i + 1).kind == "name":
                self.types.add(self.text(i + 1))
            if self.text(i) == "using" and self.text(i + 2) == "=":
                self.types.add(self.text(i + 1))

    def find_functions(self, start: int, end: int) -> None:
        """Definitions at namespace scope between two positions."""
        i = begin = start
        while i < end:
            sign = self.text(i)
            if sign == ";":
                if self.text(begin) == "template" and self.text(begin + 1) != "<":
                    self.take_instance(begin, i)
                i = begin = i + 1
            elif sign == "{":
                close = self.match[i]
                words = [self.text(k) for k in range(begin, i)]
                if "namespace" in words:
                    self.find_functions(i + 1, close)
                i = close + 1
                if self.text(i) != ";" and "=" not in words:
                    begin = i
            elif sign == "(" and self.at(i - 1).kind == "name" and self.text(i - 1) not in ("decltype", "alignas"):
                close = self.match[i]
                after = close + 1
                while self.text(after) in ("const", "noexcept"):
                    after += 1
                if self.text(after) == "{":
                    self.functions.append(self.function(begin, i, close, after))
                    i = begin = self.match[after] + 1
                else:
                    i = close + 1
            elif sign in _CLOSING:
                i = self.match[i] + 1
            else:
                i += 1

    def function(self, begin: int, opening: int, closing: int, body: int) -> Function:
        words = [self.text(k) for k in range(begin, opening)]
        # An attribute before the first word hangs on the token before it.
        before = self.attributes.get(self.solid[begin - 1] if begin else -1, [])
        marks = dict([*before, *self.attributes_of(begin, opening)])
        return Function(
            name=self.text(opening - 1),
            line=self.at(opening - 1).line,
            is_kernel="kernel" in words or "kernel" in marks,
            is_template=words[0] == "template",
            is_constexpr="constexpr" in words,
            parameters=[self.parameter(*piece) for piece in self.pieces(opening + 1, closing)],
            max_threads=int(marks.get("max_total_threads_per_threadgroup") or MAX_THREADS),
            body=(body, self.match[body]),
        )

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What commas part, outside of brackets and template arguments."""
        i = begin = start
        angle = 0
        while i < end:
            sign = self.text(i)
            if sign in _CLOSING:
                i = self.match[i]
            elif sign == "<":
                angle += 1
            elif sign == ">":
                angle -= 1
            elif sign == "," and angle == 0:
                yield begin, i
                begin = i + 1
            i += 1
        if begin < end and not (end - begin == 1 and self.text(begin) == "void"):
            yield begin, end

    def parameter(self, start: int, end: int) -> Parameter:
        stop = next((k for k in range(start, end) if self.text(k) == "="), end)
        texts = [self.text(k) for k in range(start, stop)]
        space = next((word for word in texts if word in SPACES), None)
        indirect = "*" in texts or "&" in texts
        names = [k for k in range(start, stop) if self.at(k).kind == "name"]
        # `float (&a)[N]` and `float a[N]`: sizes behind the name are no names of it.
        named = [k for k in names if not any(self.text(b) == "[" and b < k < self.match[b] for b in range(start, k))]
        marks = self.attributes_of(start, end)
        attribute, argument = marks[0] if marks else (None, None)
        return Parameter(self.text(named[-1]), space, indirect, attribute, argument, self.at(start).line)

    def in_parameters(self, i: int) -> bool:
        """Whether a "(" before position ``i`` opens the parameters of a function rather than a cast."""
        return self.text(i - 1) == "(" and self.at(i - 2).kind == "name" and self.text(i - 2) not in ("return",)

    def angle_end(self, i: int) -> int:
        """Where the template arguments that open at ``i`` close; ``i`` itself where they are none."""
        depth, k = 0, i
        while k < len(self.solid) and self.text(k) not in (";", "{", "}", ")", "&&", "||"):
            depth += {"<": 1, ">": -1}.get(self.text(k), 0)
            if depth == 0:
                return k
            k = self.match[k] + 1 if self.text(k) in _CLOSING else k + 1
        return i

    def take_instance(self, begin: int, end: int) -> None:
        """``template [[host_name("x")]] [[kernel]] ... f<float>...;`` names a kernel; the listing instantiates it."""
        host = next((argument for name, argument in self.attributes_of(begin, end) if name == "host_name"), None)
        if host is None:
            raise self.error(begin, "an explicit instantiation needs a [[host_name]]")
        last = next((k for k in range(begin + 1, end) if self.text(k) == "(" and self.text(k - 1) == ">"), end)
        depth, k = 0, last - 1
        if self.text(k) != ">":
            raise self.error(begin, "an explicit instantiation names its template arguments")
        while True:
            depth += {">": 1, "<": -1}.get(self.text(k), 0)
            if depth == 0:
                break
            k -= 1
        name = self.text(k - 1)
        arguments = " ".join(self.text(m) for m in range(k, last))
        self.instances.append((host.strip('"'), name, f"{name}{arguments}"))
        for m in range(begin, end + 1):
            self.at(m).out = ""

    def threadgroup_memory(self, function: Function) -> None:
        """Arrays and variables of the group, in the body of a kernel, become references to shared storage."""
        site = 0
        start, end = function.body
        for i in range(start, end):
            if self.text(i) != "threadgroup" or self.text(i - 1) not in (";", "{", "}"):
                continue
            j = i + 1
            while self.at(j).kind == "name" or self.text(j) == "::":
                if self.text(j + 1) == "<":
                    depth = 0
                    j += 1
                    while True:
                        depth += {"<": 1, ">": -1}.get(self.text(j), 0)
                        j += 1
                        if depth == 0:
                            break
                elif self.at(j + 1).kind == "name" or self.text(j + 1) == "::" or self.text(j + 1) in "*&":
                    j += 1
                else:
                    break
            # j: the first declarator, or the star of a pointer
            if self.text(j) in ("*", "&"):
                continue
            if not function.is_kernel:
                raise self.error(i, f"{function.name}: threadgroup memory is declared in kernels only")
            stop = next(k for k in range(j, end) if self.text(k) == ";")
            element = " ".join(self.text(k) for k in range(i + 1, j))
            made = []
            for a, b in self.pieces(j, stop):
                if any(self.text(k) == "=" for k in range(a, b)):
                    raise self.error(a, "threadgroup memory has no initial value")
                name, sizes = self.text(a), "".join(f" {self.text(k)}" for k in range(a + 1, b))
                made.append(
                    f"typedef {element} {name}_storage{sizes}; struct {name}_site {{"
                    f' static const char* name() {{ return "{name}"; }}'
                    " static const char* function() { return __PRETTY_FUNCTION__; } };"
                    f" {name}_storage& {name} = msl::threadgroup_array<{name}_site, {name}_storage>"
                    f"({site}, {int(self.casts_threadgroup)}, {self.at(a).line});"
                )
                site += 1
            for k in range(i, stop + 1):
                self.at(k).out = ""
            self.at(i).out = " ".join(made)

    def check_arguments(self, function: Function) -> None:
        """Pointers and references name their address space; where they are passed, it must be so."""
        for p in function.parameters:
            if p.indirect and p.space is None:
                names = ", ".join(SPACES)
                raise CompileError(f"line {p.line}: {function.name}: {p.name} needs an address space ({names})")
        if function.is_kernel or function.is_constexpr:
            return
        checks = "".join(
            f" msl::expect<'{SPACES[p.space]}'>(msl::where({p.name}), \"{p.name}\", {function.line});"
            for p in function.parameters
            if p.indirect and p.space
        )
        self.at(function.body[0]).out += checks

    def forbid_bare_pointers(self) -> None:
        """A pointer or reference to a type that is known, with no address space before or behind the type."""
        for i in range(1, len(self.solid) - 1):
            if self.text(i) not in ("*", "&") or self.text(i - 1) not in self.types | {"const"}:
                continue
            k = i - 1
            while self.at(k).kind == "name" and (self.text(k) in self.types or self.text(k) in ("const", "volatile")):
                k -= 1
            declared = self.text(k) in (*SPACES, "::", ">", "struct", "auto") or k < 0
            follows = self.at(i + 1).kind == "name" or self.text(i + 1) in (")", ">")
            if not declared and follows and self.text(i - 1) != "auto" and k != i - 1:
                raise self.error(i, f"'{self.text(i - 1)}{self.text(i)}' needs an address space")

    def rewrite(self, i: int) -> None:
        token = self.at(i)
        if token.out == "" or token.out != token.text:
            return
        before = self.text(i - 1)
        if token.kind == "number":
            token.out = _literal(token.text)
        elif token.kind == "name":
            if token.text in ("device", "thread", "threadgroup", "kernel") and before not in (".", "->", "::"):
                token.out = ""
            elif token.text == "constant":
                token.out = "" if "const" in (before, self.text(i + 1), self.text(i + 2)) else "const"
            elif before == "." and re.fullmatch("[xyzw]{2,4}|[rgba]{2,4}", token.text):
                parts = ", ".join(str(("xyzw" if letter in "xyzw" else "rgba").index(letter)) for letter in token.text)
                token.out = f"template swizzle<{parts}>()"

    def kernels(self) -> dict[str, tuple[str, Function]]:
        by_name = {function.name: function for function in self.functions if function.is_kernel}
        found = {name: (name, function) for name, function in by_name.items() if not function.is_template}
        for host, template, instance in self.instances:
            if template not in by_name:
                raise CompileError(f"'{host}' instantiates {template}, which is no kernel of this source")
            found[host] = (instance, by_name[template])
        return found

    def listing(self, kernels: dict[str, tuple[str, Function]]) -> str:
        lines = []
        rows = []
        for number, (name, (instance, function)) in enumerate(kernels.items()):
            roles = ", ".join(_roles(function))
            count = len(function.parameters)
            lines.append(
                f"static const msl::Role msl_roles_{number}[] = {{{roles}}};\n"
                f"static msl::Parameter msl_parameters_{number}[{count}];\n"
                f"static void msl_entry_{number}() {{ msl::call(&{instance}, msl_roles_{number}); }}\n"
                f"static int msl_described_{number} = "
                f"(msl::describe(&{instance}, msl_roles_{number}, msl_parameters_{number}), 0);"
            )
            rows.append(f'{{"{name}", msl_entry_{number}, {count}, {function.max_threads}, msl_parameters_{number}}}')
        lines.append(f'extern "C" {{ MSL_VISIBLE msl::Kernel msl_kernels[] = {{{", ".join([*rows, "{}"])}}};')
        lines.append("MSL_VISIBLE msl::Declaration* msl_declarations() { return msl::declarations; } }")
        return '#line 1 "listing"\n' + "\n".join(lines) + "\n"


def _roles(function: Function) -> Iterator[str]:
    """The C++ of every parameter's role; buffers without an index get the next free one, as in Metal."""
    taken = {int(p.argument or "-1") for p in function.parameters if p.attribute == "buffer"}
    free = (index for index in range(64) if index not in taken)
    for p in function.parameters:
        if p.indirect and p.attribute in (None, "buffer"):
            index = int(p.argument or "0") if p.attribute == "buffer" else next(free)
            if index > 30:
                raise CompileError(f"line {p.line}: {function.name}: {p.name} has buffer index {index}, the last is 30")
            if p.space not in ("device", "constant"):
                raise CompileError(
                    f"line {p.line}: {function.name}: {p.name} is {p.space} memory; torch binds device and constant"
                )
            yield f"{{\"{p.name}\", {index}, 0, 0, '{SPACES[p.space]}'}}"
        elif p.attribute in ATTRIBUTES and not p.indirect:
            yield f"{{\"{p.name}\", -1, __builtin_offsetof(msl::Place, {p.attribute}), {ATTRIBUTES[p.attribute]}, 'p'}}"
        else:
            raise CompileError(
                f"line {p.line}: {function.name}: {p.name} needs an attribute that says what it is, "
                f"got {p.attribute or 'none'}"
            )


def _literal(text: str) -> str:
    """Numbers with a point are floats, not doubles; ``h`` and ``bf`` make the small ones."""
    if text[:2] in ("0x", "0X") and "p" not in text.lower():
        return text
    if not re.search(r"[.eEpP]", text) and not text.lower().endswith(("f", "h")):
        return text
    for suffix, kind in (("bf", "bfloat"), ("h", "half")):
        if text.lower().endswith(suffix):
            return f"{kind}({text[: -len(suffix)]}f)"
    return text if text[-1] in "fF" else text + "f"
