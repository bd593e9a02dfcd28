"""What of a page reaches a browser: links that lead somewhere, docstrings as they were meant, and nothing that runs.

What runs and notebooks say is shown and not executed: every page of ``outputs/`` is cleaned by bleach as the last step,
whatever made it. Read next: ``docs/conf.py``.
"""

import dataclasses
import inspect
import posixpath
import re

import bleach
from docutils import nodes
from sphinx import addnodes

TAGS = frozenset(
    "a abbr b blockquote br caption cite code col colgroup dd del details div dl dt em figcaption figure h1 h2 h3 h4 "
    "h5 h6 hr i img li ol p pre s section small span strong sub summary sup table tbody td tfoot th thead tr u "
    "ul".split()
)
ATTRIBUTES = ("class", "id", "title", "align", "colspan", "rowspan", "width", "height", "alt", "open", "style")
PICTURE = re.compile(r"data:image/(png|jpeg|gif)[;,]|(?![\s/\\])[^:\\]*$", re.I)  # in the page, or of the site
SIZE = re.compile(r"(width|height): [\d.]+(px|%);?", re.I)  # the only style that Sphinx writes
VERDICTS = ("holds", "contradicted", "tie", "undecided", "not testable")
LITERAL = re.compile(r"(``.+?``|:\w+:`[^`]+`|`[^`]+`_)", re.S)


def cleaned(page: str) -> str:
    """HTML with the tags, attributes and addresses that can neither run nor fetch; other tags become text."""
    page = re.sub(r"<(style|script)\b.*?</\1\s*>", "", page, flags=re.S | re.I)
    return bleach.clean(page, TAGS, _allowed, protocols=("http", "https", "mailto", "data"))


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "src":
        return tag == "img" and PICTURE.match(value) is not None
    if name == "style":
        return SIZE.fullmatch(value) is not None
    return name in ATTRIBUTES or (tag == "a" and name == "href" and not value.lower().startswith("data:"))


def clean_page(app, name, template, context, doctree) -> None:
    """Of a page that shows what runs and notebooks say, the body and its contents."""
    if name.startswith("outputs/"):
        context |= {key: cleaned(context[key]) for key in ("body", "toc") if context.get(key)}


def lead_to_pages(app, doctree) -> None:
    """A link to a notebook leads to the executed one; one to what is no page (a folder, a bare table) is text."""
    for link in [n for n in doctree.findall(addnodes.pending_xref) if n["reftype"] == "myst"]:
        target, found = link["reftarget"], app.env.found_docs
        if link["refdomain"] == "doc" and target not in found:
            executed = re.sub(r"^notebooks/(\w+)/", r"outputs/\1/notebooks/", target)
            if executed in found:
                link["reftarget"] = executed
            else:
                link.replace_self(link.children)
        elif (app.srcdir / posixpath.dirname(link["refdoc"]) / target).exists():
            link.replace_self(link.children)


def dress_tables(app, doctree, name) -> None:
    """A verdict is coloured by what it says; a cell of many words is not squeezed to one a line."""
    for word in [*doctree.findall(nodes.strong), *doctree.findall(nodes.entry)]:
        if (said := word.astext()) in VERDICTS:
            word["classes"] += ["verdict", f"verdict-{said.split()[0]}"]
        if isinstance(word, nodes.entry) and len(said) > 30:
            word["classes"].append("long")


def as_meant(app, what, name, thing, options, lines) -> None:
    """A docstring in reStructuredText: stars and bars are themselves, and what is set in columns stays so."""
    out, block = [], ""  # of the block at hand: "" none, "-" a list, "|" columns, "a" a paragraph
    for line in lines:
        column = line.startswith(" ")
        kind = block if not line or (column and block == "-") else "|" if column else "-" if line[:2] == "- " else "a"
        if kind != block:
            out += ["", ".. code-block:: text", ""] if kind == "|" else [""]
        out.append(f"   {line}" if kind == "|" and line else line)
        block = kind if line or kind == "|" else ""
    text = "\n".join(out)
    parts = LITERAL.split(text)
    parts[::2] = [re.sub(r"(?<!\\)[*|](?=\S)", r"\\\g<0>", part) for part in parts[::2]]
    parts[1::2] = [
        f"{said}\\ " if after[:1].isalnum() else said for said, after in zip(parts[1::2], parts[2::2], strict=True)
    ]
    lines[:] = "".join(parts).split("\n")


def fields_alone(app, what, name, thing, options, signature, returns):
    """Of a dataclass the fields and their defaults: what a field may hold fills a screen, and its docstring says it."""
    if dataclasses.is_dataclass(thing) and isinstance(thing, type):
        fields = inspect.signature(thing).parameters.values()
        return f"({', '.join(str(f.replace(annotation=f.empty)) for f in fields)})", ""


def setup(app) -> dict:
    app.connect("autodoc-process-docstring", as_meant)
    app.connect("autodoc-process-signature", fields_alone)
    app.connect("doctree-read", lead_to_pages)
    app.connect("doctree-resolved", dress_tables)
    app.connect("html-page-context", clean_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
