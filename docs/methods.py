"""A page per method, made of its own file and of the stored tables when the site is built: nothing is written twice.

They land in ``docs/api/methods/``, which git ignores. Read next: ``docs/methods.md``, the table of all.
"""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
import typing
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

import pandas as pd

import fedlib_lab  # noqa: F401  # its methods
from fedlib.core.annotations import When
from fedlib.core.paths import outputs_dir, params_dir
from fedlib.core.validation import LIMITS, field_hints
from fedlib.methods import METHODS, Method
from fedlib_lab.atlas.scores import BINDS, tasks_of
from fedlib_lab.report.page import grid_names, short_title
from fedlib_lab.report.style import data_title, spelled, title_of
from fedlib_lab.report.tables import collect, label_of, load_cells, markdown_table, with_further
from fedlib_lab.runs.identity import concern, older_rules
from fedlib_lab.runs.params import load_spec
from fedlib_lab.runs.params_files import papers
from fedlib_lab.runs.store import Run

PROFILE = "small"  # of the stored tables
FAMILIES = {"sliced": "sliced: for clients that cannot hold the whole model",
            "personal": "personal: a part or a model of its own for every client",
            "rivals": "rival: only the atlas compares it"}  # fmt: skip
SCORES = {"accuracy": "mean over exits", "last": "last exit", "local": "clients' own tests",
          "clients": "clients' own tests, ± over clients", "left": "clients' own tests, ± over clients"}  # fmt: skip
CODE = re.compile(r"(``.+?``|\*\*.+?\*\*)", re.S)
spec = cache(load_spec)  # of a paper's table
STANDS = ["label", "own labels", "sd", "all alike", "majority", "seeds", "rank", "flags"]


def plain(text: str) -> str:
    """A docstring's text as Markdown: only its code and what is bold are marked."""
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"([\\*_`\[\]$~#])", r"\\\1", p).replace("<", "&lt;") for p in parts[::2]]
    return "".join(parts)


def shown(rows: list, columns: list[str]) -> str:
    """A Markdown table; code in it is as it was."""
    text = markdown_table(pd.DataFrame(rows, columns=columns))
    return re.sub(r"`[^`\n]+`", lambda m: m[0].replace("&lt;", "<"), text)


@cache
def told(name: str) -> dict[str, str]:
    """Of a method's file: its ``title`` and ``says`` (the first sentence), ``paper``, ``box`` and ``deviations``."""
    first, *rest = str(inspect.getdoc(import_module(METHODS[name].__module__))).split("\n\n")
    first, _, more = first.partition("\n")
    title, says = first.split(": ", 1)
    text = re.sub(r"Read next:.*?(?=\n\n|\Z)", "", "\n\n".join([more, *rest]), flags=re.S)
    box, _, deviations = re.sub(r"\s*(?=^Deviations\b)", "\0", text, count=1, flags=re.M).partition("\0")
    paper = re.search(r"\((.+?)\)", title) or re.search(r"^Source: (.+?)\.$", box, re.M)
    paper = paper or re.search(r" (as .+)", title)
    paper = paper[1] if paper else "–"
    box = re.sub(r"^Source: .+", "", box, flags=re.M).strip() or f"{says[0].upper()}{says[1:]}"
    box = re.sub(r"(?<=\S)\s+(?=(?:Server|Client)\b[^.;]{0,60}:)", "\n\n", box)
    return {"title": title, "says": says, "paper": paper, "box": box, "deviations": deviations.strip()}


@cache
def comments(cls: type) -> dict[str, str]:
    """What stands beside or above each field in the source of ``cls``."""
    source = inspect.getsource(import_module(cls.__module__))
    said = {t.start[0]: t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT}
    found, body = {}, next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == cls.__name__)
    for node in (n for n in body.body if isinstance(n, ast.AnnAssign)):
        lines, above = [said[node.end_lineno]] if node.end_lineno in said else [], node.lineno - 1
        while not lines[1:] and above in said and said[above].line.strip().startswith("#"):
            lines, above = [said[above], *lines], above - 1
        found[ast.unparse(node.target)] = " ".join(t.string.lstrip("# ") for t in lines if "fmt:" not in t.string)
    return found


def allowed(hint) -> tuple[str, list[str], list[str]]:
    """The type that an annotation asks for, what limits its values, and when the field counts."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kind, values, when = allowed(args[0])
        values = values + [f"{LIMITS[type(m)][0]} {dataclasses.astuple(m)[0]:g}" for m in args[1:] if type(m) in LIMITS]
        switches = [m.switches.items() for m in args[1:] if isinstance(m, When)]
        return kind, values, when + [f"`{k} = {' | '.join(map(repr, v))}`" for s in switches for k, v in s]
    if origin is typing.Literal:
        return "str", [", ".join(f"`{a}`" for a in args)], []
    if origin is tuple:
        return f"list of {allowed(args[0])[0]}", *allowed(args[0])[1:]
    of = [allowed(a) for a in args if a is not type(None)] or [(hint.__name__, [], [])]
    kinds = [*(kind for kind, _, _ in of), *["None"] * (type(None) in args)]
    return " or ".join(kinds), [v for _, values, _ in of for v in values], [w for _, _, when in of for w in when]


def options(name: str) -> str:
    """A row per option, the method's own first."""
    cls, rows = METHODS[name], []
    for f in sorted(dataclasses.fields(cls), key=lambda f: _declared(cls, f.name)):
        kind, values, when = allowed(field_hints(cls)[f.name])
        says = [plain(next(filter(None, (comments(c).get(f.name) for c in _dataclasses(cls))), ""))]
        says += [f"counts with {' and '.join(when)}"] if when else []
        of = f"`{_dataclasses(cls)[_declared(cls, f.name)].__name__}`"
        says = "; ".join(filter(None, says)) or "–"
        rows.append([f"`{f.name}`", kind, f"`{f.default!r}`", " and ".join(values) or "any", says, of])
    return shown(rows, ["option", "type", "default", "allowed", "what it says", "of"])


def _dataclasses(cls: type) -> list[type]:
    """Of a class and its bases, nearest first."""
    return [c for c in cls.__mro__ if dataclasses.is_dataclass(c)]


def _declared(cls: type, field: str) -> int:
    """Which of them declares ``field``, its default and what it may be."""
    return next(i for i, c in enumerate(_dataclasses(cls)) if field in inspect.get_annotations(c))


def hooks(name: str) -> str:
    """What of :class:`Method` the class overrides, or one between them does."""
    cls, rows = METHODS[name], []
    for hook in (h for h, v in vars(Method).items() if inspect.isfunction(v) or isinstance(v, property)):
        of = next(c for c in cls.__mro__ if hook in vars(c))
        if of is not Method and not hook.startswith("_"):
            own = vars(of)[hook]  # a plain value in place of a property
            says = repr(own) if isinstance(own, (str, bool)) else plain((own.__doc__ or "–").split("\n\n")[0])
            rows.append([f"`{hook}`", f"`{of.__name__}`", says])
    return shown(rows, ["hook", "of", "what it says"])


@cache
def stored(paper: str, table: str, outputs: Path) -> pd.DataFrame:
    """What is stored of a table, a row per number, with its method in ``key``."""
    path = outputs / paper / "tables" / f"{table}_{PROFILE}.csv"
    frame = pd.read_csv(path) if path.is_file() else pd.DataFrame(columns=["method"])
    labels = {label_of(row.get("label", v)): row["method"] for v, row in spec(paper, table)["variants"].items()}
    return frame.assign(key=frame.method.map(labels)) if "obtained" in frame else frame[:0].assign(key="")


def printed() -> list[str]:
    """The papers that print numbers."""
    return [p for p in papers() if (params_dir() / p / "reported").is_dir()]


def tables(name: str) -> list[tuple[str, str]]:
    """Where a method is a row: of each paper the first table, stored ones before others; then the atlas, rows tuned."""
    found, has = [], lambda paper, t: any(row["method"] == name for row in spec(paper, t)["variants"].values())
    for paper in sorted(printed(), key=lambda p: (p != name, p)):
        order = [((stored(paper, t, outputs_dir()).key != name).all(), spec(paper, t).get("priority", 9), i, t)
                 for i, t in enumerate(grid_names(paper)) if has(paper, t)]  # fmt: skip
        found += [(paper, min(order)[-1])] if order else []
    atlas = dict.fromkeys(t for caps in BINDS for t in tasks_of(f"{caps}_tuned").values() if has("atlas", t))
    return found + [("atlas", t) for t in atlas]


@cache
def older(paper: str, table: str) -> set[tuple[str, str, str]]:
    """Mode, column and label of the stored numbers of which a run is of an older rule of the kit."""
    with warnings.catch_warnings(action="ignore"):
        frame = with_further(collect(load_cells(paper, table, PROFILE)), spec(paper, table))
    value = spec(paper, table).get("value", "accuracy")
    frame = frame[[isinstance(r, Run) and concern(older_rules(r.experiment, r.record), value) for r in frame.found]]
    return set(zip(frame.finetune.map(label_of), frame.column, frame.label.map(label_of), strict=True))


def numbers(name: str) -> str:
    """Every stored number of :func:`tables`, and where the atlas puts it."""
    rows = []
    for paper, table in tables(name):
        frame, value = stored(paper, table, outputs_dir()), spec(paper, table).get("value", "accuracy")
        for r in frame.loc[frame.key == name].to_dict("records"):
            was = older(paper, table) if any((outputs_dir() / "runs").glob("*-*")) else ()
            where = f"[{spelled(paper)}, {short_title(paper, table)}](../../../outputs/{paper}/README.md)"
            note = "made by an older rule of the kit" if (r["mode"], r["column"], r["method"]) in was else "–"
            sets = [data_title(d) for d in r["data"].split(", ")]  # of several their average
            data = ", ".join(sets) if sets[1:] or paper == "atlas" else title_of(r["column"], r["data"])
            rows.append([where, data, r["mode"], r["method"], r["obtained"], r["seeds"], SCORES[value],
                         r.get("reported", "–"), note])  # fmt: skip
    if not rows:
        return f"No stored run of it at profile `{PROFILE}`."
    columns = ["table", "data", "mode", "row", "obtained", "seeds", "of", "in print", "note"]
    said = "mean over as many seeds as the row says ± SD over them, if the row does not say over clients"
    text = [f"Of the last round at profile `{PROFILE}`, in percent: {said}. In print: on the paper's own data and net, "
            "so compare orderings.", shown(rows, columns)]  # fmt: skip
    found = []
    for path in sorted((outputs_dir() / "atlas" / "tables").glob(f"map_{PROFILE}_*_tuned_ranking.csv")):
        frame, caps = pd.read_csv(path), path.stem.split("_")[-3]
        titles = frame.task.map(title_of)
        found.append(frame.assign(capped=BINDS[caps], task=titles)[frame.method == name])
    if sum(map(len, found)):
        rows = pd.concat(found)[["capped", "task", *STANDS]]
        text += ["In [the atlas](../../../outputs/atlas/README.md), each row tuned, in percent: on clients' own shares "
                 "of labels, where all classes are alike, and what always answering one's own majority class "
                 "gives. Fewer than three seeds are not ranked; a flag is of some run.",
                 shown(rows.values.tolist(), list(rows))]  # fmt: skip
    return "\n\n".join(text)


def command(name: str) -> tuple[str, str, str]:
    """The table that a method is run in, and which key chooses its row there; without a row, one of plain methods."""
    plain_ones = ((p, t) for p in printed() for t in grid_names(p) if "method" in spec(p, t)["axes"])
    paper, table = next(iter(tables(name)), None) or next(plain_ones)
    row = next((v for v, row in spec(paper, table)["variants"].items() if row["method"] == name), name)
    return f"{paper}/{table}", "method" if "method" in spec(paper, table)["axes"] else "variant", row


def family(cls: type[Method]) -> str:
    """The folder of its file."""
    return cls.__module__.split(".")[-2]


def page(name: str) -> str:
    """The page of a registered method as Markdown."""
    cls, (table, key, row) = METHODS[name], command(name)
    file, code = cls.__module__.replace(".", "/") + ".py", inspect.getsource(import_module(cls.__module__))
    first = 1 + len(code.split('"""')[1].splitlines())  # below its docstring
    return f"""# {cls.label}

**{plain(told(name)["title"])}**: {plain(told(name)["says"])}

`method: {name}`, {FAMILIES[family(cls)]}.

## What clients do, and the server

{plain(told(name)["box"])}

## Run it

```sh
fedlib run {table} --profile smoke --set {key}={row}  # seconds, meaningless numbers
fedlib run {table} --set {key}={row}  # {PROFILE}: what is stored is shown, what is missing is trained
fedlib explain {table} {row}  # which layer of params/ set which value
```

```python
from fedlib import recipe, run

e = recipe("{table}", "smoke", {key}="{row}")
print(run(e, folder="outputs/scratch/runs").summary["accuracy"])
```

## Numbers

{numbers(name)}

## Options

{options(name)}

## Hooks

What it has in place of [the defaults](../../guide/methods.md#hooks), its own or of a class between.

{hooks(name)}

## Deviations

{plain(told(name)["deviations"]) or "Its file names none."}

## Its file

`{file}`

```{{literalinclude}} /{file}
:language: python
:lines: {first + 1}-
```
"""


def table() -> str:
    """All methods, a row each."""
    every, rows = len(dataclasses.fields(Method)), []
    for name, cls in built_in().items():
        own = f"{len(dataclasses.fields(cls)) - every} + {every}"
        link = f"[{cls.label}](api/methods/{name}.md), `{name}`"
        rows.append([link, family(cls).removesuffix("s"), plain(told(name)["paper"]), plain(told(name)["says"]), own])
    return shown(rows, ["method", "family", "paper", "what it does", "options, own + all methods'"])


def built_in() -> dict[str, type[Method]]:
    """The kit's own methods; what a reader has registered has no file here."""
    return {n: c for n, c in METHODS.items() if c.__module__.split(".")[0] in ("fedlib", "fedlib_lab")}


def write(folder: Path) -> None:
    """Every page and the table into ``folder``; one that is as it was keeps its date, one without a method goes."""
    texts = {f"{n}.md": page(n) for n in built_in()} | {"table.txt": table() + "\n"}
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.name not in texts:
            path.unlink()
    for name, text in texts.items():
        if not (path := folder / name).is_file() or path.read_text("utf-8") != text:
            path.write_text(text, encoding="utf-8")


def builder_inited(app) -> None:
    docs = Path(app.srcdir) / "docs"
    if (docs / "methods.md").is_file():  # the page that shows them
        write(docs / "api/methods")


def setup(app) -> dict:
    app.connect("builder-inited", builder_inited)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
