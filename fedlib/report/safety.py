"""What may stand on a page of the report: what runs and notebooks say is shown, and none of it runs or fetches.

Three walls: forms of output that can run are left out (``harmless``), markup is cleaned by bleach (``cleaned``), and
the page forbids its browser all scripts and all addresses (``POLICY``). Read next: ``report/site.py``.
"""

import html
import re

POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "img-src data:; style-src 'unsafe-inline'; font-src data:\">"
)
FORMS = ("image/png", "image/jpeg", "image/svg+xml", "text/html", "text/markdown", "text/latex", "text/plain")
TAGS = frozenset(
    "a abbr b blockquote br caption code col colgroup dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img li ol p "
    "pre s small span strong sub summary sup table tbody td tfoot th thead tr u ul".split()
)
ATTRIBUTES = ("class", "id", "title", "align", "colspan", "rowspan", "width", "height", "alt", "open")
PICTURE = re.compile(r"data:image/(png|jpeg|gif|svg\+xml)[;,]|(?![\s/\\])[^:\\]*$", re.I)  # in the page, or beside it


def escaped(text: str) -> str:
    """``text`` as Markdown and HTML show it literally, on one line, also in a table's cell."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*_{}\[\]()+!|~$:-]", lambda m: f"&#{ord(m[0])};", text)


def harmless(output):
    """A notebook's output without the forms that can run: scripts, widgets, diagrams drawn by scripts."""
    if "data" in output:
        output.data = {form: said for form, said in output.data.items() if form in FORMS}
        output.metadata = {}
    return output


def cleaned(page: str) -> str:
    """HTML with the tags, attributes and addresses that can neither run nor fetch; other tags become text."""
    import bleach

    page = re.sub(r"<style\b.*?</style\s*>", "", page, flags=re.S | re.I)  # of pandas' tables
    return bleach.clean(page, TAGS, _allowed, protocols=("http", "https", "mailto", "data"))


def _allowed(tag: str, name: str, value: str) -> bool:
    if name == "src":
        return tag == "img" and PICTURE.match(value) is not None
    return name in ATTRIBUTES or (tag == "a" and name == "href" and not value.lower().startswith("data:"))
