"""A shader's text, read: tokens with their lines, brackets, attributes, types and functions. No grammar, just enough.

Positions count solid tokens: white space, line markers and attributes are passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

#: address space -> its letter in the C++
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
VECTORS = tuple(f"{packed}{scalar}{n}" for scalar in SCALARS for n in (2, 3, 4) for packed in ("", "packed_"))
ATOMICS = ("atomic_int", "atomic_uint", "atomic_float", "atomic_bool")
PLAIN_TYPES = frozenset((*SCALARS, *FIXED, *VECTORS, *ATOMICS, "void"))
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
    type: str
    line: int
    space: str | None
    #: a pointer or reference
    indirect: bool
    #: ("buffer", "3"), say
    attribute: tuple[str, str | None] | None


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    is_kernel: bool
    is_template: bool
    is_constexpr: bool
    parameters: list[Parameter]
    #: threads of a group, as [[max_total_threads_per_threadgroup]] limits them
    max_threads: int
    #: positions of its braces
    body: tuple[int, int]


@dataclass(frozen=True)
class Instance:
    """``template [[host_name("x")]] [[kernel]] ... f<float>...;``"""

    host_name: str
    function: str
    arguments: str
    #: positions of its first word and its semicolon
    span: tuple[int, int]


class Shader:
    def __init__(self, text: str) -> None:
        self.tokens = list(_tokenize(text))
        self.solid = [i for i, token in enumerate(self.tokens) if token.kind not in ("space", "marker")]
        #: position of a bracket -> of its partner
        self.match = self._brackets()
        #: index of the token before an attribute -> (name, argument)
        self.attributes: dict[int, list[tuple[str, str | None]]] = {}
        self._take_attributes()
        self.match = self._brackets()
        self.types = {
            self.text(i + 1)
            for i in range(len(self.solid))
            if (self.text(i) in ("struct", "class", "union", "typename", "enum") and self.at(i + 1).kind == "name")
            or (self.text(i) == "using" and self.text(i + 2) == "=")
        }
        self.functions: list[Function] = []
        self.instances: list[Instance] = []
        self._find_functions(0, len(self.solid))

    def at(self, i: int) -> Token:
        return self.tokens[self.solid[i]] if 0 <= i < len(self.solid) else Token("end", "", 0)

    def text(self, i: int) -> str:
        return self.at(i).text

    def span(self, start: int, end: int) -> str:
        return " ".join(self.text(i) for i in range(start, end))

    def error(self, i: int, what: str) -> CompileError:
        return CompileError(f"line {self.at(i).line}: {what}")

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """What commas part, outside of brackets and template arguments."""
        i = begin = start
        angle = 0
        while i < end:
            sign = self.text(i)
            if sign in _CLOSING:
                i = self.match[i]
            elif sign == "," and angle == 0:
                yield begin, i
                begin = i + 1
            angle += {"<": 1, ">": -1}.get(sign, 0)
            i += 1
        if begin < end:
            yield begin, end

    def angle_end(self, i: int) -> int:
        """Where the template arguments that open at ``i`` close; ``i`` itself where it is a comparison."""
        depth, k = 0, i
        while k < len(self.solid) and self.text(k) not in (";", "{", "}", ")", "&&", "||"):
            depth += {"<": 1, ">": -1}.get(self.text(k), 0)
            if depth == 0:
                return k
            k = self.match[k] + 1 if self.text(k) in _CLOSING else k + 1
        return i

    def declarator(self, i: int) -> int:
        """Behind the type that begins at ``i``: its star, its ampersand, or the first name that is declared."""
        while True:
            after = self.angle_end(i + 1) + 1 if self.text(i + 1) == "<" else i + 1
            if self.text(after) in ("*", "&"):
                return after
            if self.text(after) != "::" and self.text(i) != "::" and self.at(after).kind != "name":
                return i
            i = after

    def attributes_of(self, start: int, end: int) -> list[tuple[str, str | None]]:
        return [found for k in range(start, end) for found in self.attributes.get(self.solid[k], [])]

    def _brackets(self) -> dict[int, int]:
        match: dict[int, int] = {}
        open_at: list[int] = []
        for i in range(len(self.solid)):
            sign = self.text(i)
            if sign in _CLOSING:
                open_at.append(i)
            elif sign in _CLOSING.values():
                if not open_at or _CLOSING[self.text(open_at[-1])] != sign:
                    raise self.error(i, f"'{sign}' closes nothing")
                match[i] = open_at.pop()
                match[match[i]] = i
        if open_at:
            raise self.error(open_at[-1], f"'{self.text(open_at[-1])}' is never closed")
        return match

    def _take_attributes(self) -> None:
        """``[[name(argument), ...]]`` is noted at the token before it, and passed over from then on."""
        kept: list[int] = []
        i = 0
        while i < len(self.solid):
            if self.text(i) != "[" or self.text(i + 1) != "[" or self.solid[i + 1] != self.solid[i] + 1:
                kept.append(self.solid[i])
                i += 1
                continue
            inside = self.match[i + 1]
            for start, end in self.pieces(i + 2, inside):
                opening = next((k for k in range(start, end) if self.text(k) == "("), end)
                argument = "".join(self.text(k) for k in range(opening + 1, end - 1)) if opening < end else None
                name = "".join(self.text(k) for k in range(start, opening))
                self.attributes.setdefault(kept[-1] if kept else -1, []).append((name, argument))
            for k in range(i, inside + 2):
                self.at(k).out = ""
            i = inside + 2
        self.solid = kept

    def _find_functions(self, start: int, end: int) -> None:
        """Definitions and explicit instantiations at namespace scope between two positions."""
        i = begin = start
        while i < end:
            sign = self.text(i)
            if sign == ";":
                if self.text(begin) == "template" and self.text(begin + 1) != "<":
                    self.instances.append(self._instance(begin, i))
                i = begin = i + 1
            elif sign == "{":
                words = self.span(begin, i).split()
                if "namespace" in words:
                    self._find_functions(i + 1, self.match[i])
                i = self.match[i] + 1
                if self.text(i) != ";" and "=" not in words:
                    begin = i
            elif sign == "(" and self.at(i - 1).kind == "name" and self.text(i - 1) not in ("decltype", "alignas"):
                body = self.match[i] + 1
                while self.text(body) in ("const", "noexcept"):
                    body += 1
                if self.text(body) == "{":
                    self.functions.append(self._function(begin, i, body))
                    i = begin = self.match[body] + 1
                else:
                    i = self.match[i] + 1
            else:
                i = self.match[i] + 1 if sign in _CLOSING else i + 1

    def _function(self, begin: int, opening: int, body: int) -> Function:
        words = self.span(begin, opening).split()
        # An attribute before the first word hangs on the token before it.
        before = self.attributes.get(self.solid[begin - 1] if begin else -1, [])
        marks = dict([*before, *self.attributes_of(begin, opening)])
        pieces = self.pieces(opening + 1, self.match[opening])
        return Function(
            name=self.text(opening - 1),
            line=self.at(opening - 1).line,
            is_kernel="kernel" in words or "kernel" in marks,
            is_template=words[0] == "template",
            is_constexpr="constexpr" in words,
            parameters=[self._parameter(*piece) for piece in pieces if self.span(*piece) != "void"],
            max_threads=int(marks.get("max_total_threads_per_threadgroup") or MAX_THREADS),
            body=(body, self.match[body]),
        )

    def _parameter(self, start: int, end: int) -> Parameter:
        # Sizes of arrays and defaults are no part of the name.
        stop = next((k for k in range(start, end) if self.text(k) in ("=", "[")), end)
        words = self.span(start, stop).split()
        name = next((word for word in reversed(words) if re.fullmatch(r"[A-Za-z_]\w*", word)), "")
        return Parameter(
            name=name,
            type=" ".join(word for word in words if word != name),
            line=self.at(start).line,
            space=next((word for word in words if word in SPACES), None),
            indirect="*" in words or "&" in words,
            attribute=next(iter(self.attributes_of(start, end)), None),
        )

    def _instance(self, begin: int, end: int) -> Instance:
        host = next((argument for name, argument in self.attributes_of(begin, end) if name == "host_name"), None)
        if host is None:
            raise self.error(begin, "an explicit instantiation needs a [[host_name]]")
        # The name is the last one with template arguments that end the statement or precede the parameters.
        for k in range(begin, end):
            close = self.angle_end(k + 1) if self.text(k + 1) == "<" else k
            if close > k + 1 and self.text(close + 1) in (";", "("):
                return Instance(host.strip('"'), self.text(k), self.span(k + 1, close + 1), (begin, end))
        raise self.error(begin, "an explicit instantiation names its template arguments")


def _tokenize(text: str) -> Iterator[Token]:
    """Every character of ``text`` in order, lines as the markers count them."""
    line = 1
    for match in _TOKEN.finditer(text):
        kind, piece = str(match.lastgroup), match.group()
        yield Token(kind, piece, line)
        if kind == "marker" and (marker := _MARKER.match(piece.strip())):
            line = int(marker.group(1)) - 1
        line += piece.count("\n")
