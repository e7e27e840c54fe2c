"""Convert docstrings, which are plain text with equations, for mkdocstrings."""

from typing import Any

import griffe

from generators import source
from generators.analyses import paragraphs
from generators.markup import prose


class PlainDocstrings(griffe.Extension):
    """Convert docstrings to Markdown and list the fields of classes."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Convert the docstring of a module, class or function after the package is loaded."""
        if not obj.docstring:
            return
        obj.docstring.value = paragraphs(obj.docstring.value).rstrip()
        if isinstance(obj, griffe.Class) and (fields := _fields(obj)):
            obj.docstring.value += "\n\nAttributes:\n" + "\n".join(fields)


def _fields(kind: griffe.Class) -> list[str]:
    """Return the fields of a class that have a comment, in the format of an Attributes section."""
    described = {
        name: source.comment(member.lines[-1])
        for name, member in kind.members.items()
        if isinstance(member, griffe.Attribute) and member.annotation and not member.docstring and member.lines
    }
    return [f"    {name}: {prose(comment)}" for name, comment in described.items() if comment]
