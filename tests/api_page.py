"""docs/api.md, from the names that the package promises: PYTHONPATH=src python tests/api_page.py > docs/api.md"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import moefuse
import moefuse.hf
import moefuse.nn

MODULES = (moefuse, moefuse.nn, moefuse.hf)
WIDTH = 118
HEAD = """\
# The public names

What `moefuse`, `moefuse.nn` and `moefuse.hf` export; anything else may change without notice. In shapes `T` stands for
tokens, `E` for experts, `H` for the hidden size, `I` for the intermediate size of one expert and `S = T * top_k` for
assignments. Printed by `python tests/api_page.py`; a test holds this page to what that prints.
"""


def plain(annotation: Any) -> str:
    """An annotation as it is written."""
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def signature(name: str, function: Any) -> str:
    """On one line where it fits, else one line for each parameter."""
    found = inspect.signature(function)
    shown: list[str] = []
    for parameter in found.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        typed = f"{parameter.name}: {plain(parameter.annotation)}"
        default = str(parameter.default) if not isinstance(parameter.default, str) else f'"{parameter.default}"'
        shown.append(typed if parameter.default is parameter.empty else f"{typed} = {default}")
    result = plain(found.return_annotation)
    ending = ")" if inspect.isclass(function) or result == "None" else f") -> {result}"
    line = f"{name}({', '.join(shown)}{ending}"
    return line if len(line) <= WIDTH else "\n".join((f"{name}(", *(f"    {one}," for one in shown), ending))


def entries(section: str) -> Iterator[str]:
    """The entries of ``Args:`` or ``Attributes:`` as a list."""
    for entry in re.split(r"\n(?=\S)", textwrap.dedent(section)):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        yield f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {meaning}"


def prose(doc: str) -> Iterator[str]:
    """A docstring as Markdown, without its examples."""
    for paragraph in re.split(r"\n\n+(?! )", doc.replace("``", "`")):
        head, _, rest = paragraph.partition("\n")
        if head in ("Args:", "Attributes:", "Raises:"):
            yield head.replace("Args", "Arguments")
            yield "\n".join(entries(rest))
        elif head == "Returns:":
            yield f"{head} {' '.join(rest.split())}"
        elif head == "::":
            yield rest.strip("\n")
        elif not head.startswith((">>>", "Example:")):
            yield paragraph


def wrapped(paragraph: str) -> str:
    """A paragraph or a list in lines of the usual length; what is indented stays as it is."""
    if paragraph.startswith("    "):
        return paragraph
    lines = re.split(r"\n(?=[*-] )", paragraph)
    return "\n".join(
        textwrap.fill(
            " ".join(line.split()),
            WIDTH,
            subsequent_indent="  " if line.startswith(("- ", "* ")) else "",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for line in lines
    )


def methods(owner: type) -> Iterator[str]:
    """The public methods and properties of a class that say what they do, with the first paragraph of each."""
    for name, member in vars(owner).items():
        if name.startswith("_") or not (callable(member) or isinstance(member, (classmethod, staticmethod, property))):
            continue
        doc = member.__doc__
        if doc:
            shown = f".{name}" if isinstance(member, property) else signature(f".{name}", getattr(owner, name))
            yield f"- `{' '.join(shown.split())}`: {' '.join(next(prose(inspect.cleandoc(doc))).split())}"


def entry(module: Any, name: str) -> Iterator[str]:
    value = getattr(module, name)
    yield f"### {module.__name__}.{name}"
    if not callable(value):
        yield f'The name under which transformers finds us: `"{value}"`.'
        return
    yield f"```py\n{signature(name, value)}\n```"
    yield from map(wrapped, prose(inspect.getdoc(value) or ""))
    members = "\n".join(map(wrapped, methods(value))) if inspect.isclass(value) else ""
    if members:
        yield "Methods and properties:"
        yield members


def page() -> str:
    parts = [HEAD.rstrip()]
    for module in MODULES:
        parts.append(f"## {module.__name__}")
        for name in module.__all__:
            parts += entry(module, name)
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    print(page(), end="")
