"""What is installed: one list of requirements, and a wheel that works alone."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fedlib

ROOT = Path(__file__).parents[2]
OWN = "fedlib-kit["  # an extra that asks for other extras
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_environment_yml_has_pyprojects_pins():
    import yaml

    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    extras = [x for group in PROJECT["optional-dependencies"].values() for x in group]
    wanted = PROJECT["dependencies"] + [x for x in extras if not x.startswith(OWN)]
    assert sorted(pip) == sorted([*wanted, "--editable ."])
    assert f"python{PROJECT['requires-python']}" in environment["dependencies"]


def test_lock_pins_every_requirement_with_hashes():
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = {
        line.split("==")[0].split("[")[0].lower(): line
        for line in lines
        if "==" in line and not line.startswith((" ", "#"))
    }
    extras = [x for group in PROJECT["optional-dependencies"].values() for x in group if not x.startswith(OWN)]
    for requirement in map(Requirement, PROJECT["dependencies"] + extras):
        line = pins[requirement.name.lower()]
        assert requirement.specifier.contains(line.split("==")[1].split()[0].rstrip(";\\")), line
    assert all(line.rstrip().endswith("\\") for line in pins.values())  # a hash follows


def make(*arguments):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-n", *arguments], cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_cpu_set_up_takes_torch_from_its_index_and_nothing_of_cuda():
    """-W: as if nothing were installed. The pattern that leaves packages out meets all of CUDA and nothing else."""
    done = make("-W", "requirements.lock", "setup", "BACKEND=cpu")
    locked = re.findall(r"^([\w.-]+)(?:\[.+?\])?==([\w.]+)", (ROOT / "requirements.lock").read_text(), re.M)
    torch = [f"{name}=={version}" for name, version in locked if name in ("torch", "torchvision")]
    assert len(torch) == 2 and f"--torch-backend cpu {' '.join(torch)} " in done.stdout, done.stdout + done.stderr
    assert "--require-hashes --excludes - -c requirements.lock -r pyproject.toml --extra notebooks" in done.stdout
    (pattern,) = re.findall(r"grep -oE '(.+)' requirements.lock", done.stdout)
    out = {name for name, version in locked if re.match(pattern, f"{name}=={version}")}
    assert out == {name for name, _ in locked if re.match("torch$|torchvision$|triton|nvidia|cuda", name)}
    plain = make("-W", "requirements.lock", "setup").stdout
    assert "--torch-backend" not in plain and "--require-hashes" in plain and "--compile-bytecode" in plain


@pytest.mark.parametrize("reached", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_without_the_cpu_builds_index_auto_takes_pypis_in_one_sentence(tmp_path, backend, reached):
    """The recipe with stand-ins for its programs: what is typed, and whether CUDA's packages are left out."""
    for name, body in {
        "python": f'[ "$2" = venv ] && mkdir -p {tmp_path}/v/bin && cp $0 {tmp_path}/v/bin/python; exit 0',
        "uv": f'case "$*" in *torch-backend*) exit {int(not reached)};; *excludes*) cat > {tmp_path}/out;; esac',
    }.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "v/bin").mkdir(parents=True)
    shutil.copy(tmp_path / "uv", tmp_path / "v/bin/uv")
    words = ["make", f"PYTHON={tmp_path}/python", f"VENV={tmp_path}/v", f"BACKEND={backend}", "DRIVER=false", "setup"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if "gave no CPU build" in line]
    assert (done.returncode == 0) == (reached or backend == "auto") and len(said) == (not reached), done.stderr
    if done.returncode == 0:
        assert ("torch\n" in (tmp_path / "out").read_text()) == reached
        assert ("no NVIDIA driver is here" in done.stdout) == (not reached) and (tmp_path / "v/.installed").exists()


def test_another_backend_is_refused_in_words():
    done = make("-W", "requirements.lock", "setup", "BACKEND=gpu")
    assert done.returncode and "BACKEND = 'gpu' is not possible; allowed: cpu, auto" in done.stderr


def test_a_target_installs_the_extras_that_it_needs_and_no_others():
    """By the lock's hashes: the demo and the paper whose code is here need none but the notebooks' own."""
    wanted = {"demo": [], "reefl/table1": [], "raffm/table1": ["text"], "cluster/ray": ["cluster"],
              "extensions/privacy": ["text", "privacy"], "benchmarks/engine": ["bench"], "test": ["dev"]}  # fmt: skip
    for target, extras in wanted.items():
        done = make("-W", "requirements.lock", target, f"VENV={ROOT}/nowhere").stdout
        assert sorted(re.findall(r"--extra (\w+)", done)) == sorted(["notebooks", *extras]), done
        assert done.count("--require-hashes --excludes - -c requirements.lock") == 1 + len(extras)


def test_an_active_environment_is_used_as_it_is_and_asked_for_what_a_target_needs():
    wanted = {"demo": ["notebooks"], "lab": ["text"], "cluster/ray": ["notebooks", "cluster"], "test": ["dev"]}
    for target, extras in wanted.items():
        done = make(target, "ENV=active", f"PYTHON={sys.executable}").stdout
        assert sorted(re.findall(r"docs/has.py (\w+)", done)) == sorted(extras), done
        assert "install" not in done and "venv " not in done and f"{Path(sys.executable).parent}/" in done
    refused = make("demo", "ENV=conda")
    assert refused.returncode and "ENV = 'conda' is not possible; allowed: active" in refused.stderr


def test_a_bare_environment_is_told_what_it_lacks(tmp_path):
    """And this one lacks nothing of what the tests need."""
    has = [str(ROOT / "docs" / "has.py"), "notebooks"]
    assert subprocess.run([sys.executable, *has[:1], "dev"], capture_output=True, text=True).returncode == 0
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    bare = subprocess.run([tmp_path / "bare/bin/python", *has], capture_output=True, text=True)
    assert bare.returncode == 1 and len(bare.stderr.splitlines()) == 1
    assert all(f"{name}>=" in bare.stderr for name in ("torch", "papermill", "peft", "pandas"))
    assert "pip install -e '.[notebooks]' brings it" in bare.stderr and "nbval" not in bare.stderr


OTHER_NAMES = {"IPython": "ipython", "PIL": "pillow", "yaml": "pyyaml", "sklearn": "scikit-learn"}


def test_every_import_is_declared():
    """What fedlib imports is required by name, not because something else happens to bring it."""
    lines = PROJECT["dependencies"] + [x for group in PROJECT["optional-dependencies"].values() for x in group]
    declared = {re.match(r"[\w.-]+", x)[0].lower() for x in lines}
    for path in (p for package in ("fedlib", "fedlib_lab") for p in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            for name in {n.split(".")[0] for n in names} - sys.stdlib_module_names - {"fedlib", "fedlib_lab"}:
                assert OTHER_NAMES.get(name, name.replace("_", "-")) in declared, f"{path.name} imports {name}"


def test_no_text_tells_to_install_a_strangers_package():
    """The distribution is fedlib-kit: ``fedlib`` on the index is somebody else's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True).stdout.split("\0")
    files = [ROOT / n for n in listed if n.endswith((".py", ".md", ".ipynb", ".toml", ".yml", ".cff", "Makefile"))]
    assert PROJECT["name"] == "fedlib-kit" and len(files) > 300
    for path in files:
        found = re.search(r"pip install [^`\n]*?\bfedlib(?!-kit)\b|[\"']fedlib\\?\[", path.read_text())
        assert not found, f"{path.relative_to(ROOT)}: {found[0]}"


VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools_scm"]["fallback_version"]
BACKEND = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"


def build(hook, where, to):
    done = subprocess.run([sys.executable, "-c", BACKEND, hook, to], cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_version_is_said():
    import yaml

    assert PROJECT["dynamic"] == ["version"] and re.fullmatch(r"\d+\.\d+\.\d+", fedlib.__version__)
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == VERSION


def test_the_version_is_the_last_tags_and_a_clone_without_tags_builds(tmp_path):
    """A shallow clone says a version too. Of what git knows the source distribution holds the package and its recipes."""

    def git(*words, where):
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *words], cwd=where, check=True, capture_output=True)

    source = tmp_path / "source"
    for name in ("fedlib/__init__.py", "params/a/base.yaml", "tests/test_a.py", "outputs/a.md"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "1"], ["tag", "v9.8.7"], ["commit", "-qm", "2", "--allow-empty"]):  # fmt: skip
        git(*words, where=source)
    git("clone", "-q", "--depth", "1", f"file://{source}", "shallow", where=tmp_path)
    for where, version in ((source, "9.8.7"), (tmp_path / "shallow", VERSION)):
        build("build_sdist", where, tmp_path)
        with tarfile.open(tmp_path / f"fedlib_kit-{version}.tar.gz") as sdist:
            names = {name.partition("/")[2].partition("/")[0] for name in sdist.getnames()}
        assert {"fedlib", "params"} <= names and not names & {"tests", "outputs"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel that is made of what it holds."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".venv*", ".git", "outputs", "*.egg-info", "build")
    shutil.copytree(ROOT, source, ignore=ignored)
    build("build_sdist", source, folder)
    shutil.unpack_archive(*folder.glob("*.tar.gz"), folder, filter="data")
    build("build_wheel", folder / f"fedlib_kit-{VERSION}", folder)
    return folder


def test_the_wheel_holds_every_module_and_every_recipe(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    both = [p for package in ("fedlib", "fedlib_lab") for p in (ROOT / package).rglob("*")]
    ours = {p.relative_to(ROOT).as_posix() for p in both if p.suffix in (".py", ".yaml")}
    recipes = {p.relative_to(ROOT) for kind in ("yaml", "csv") for p in (ROOT / "params").rglob(f"*.{kind}")}
    assert {n for n in names if n.endswith((".py", ".yaml", ".csv"))} == ours | {
        f"fedlib/{p.as_posix()}" for p in recipes
    }
    assert "fedlib/models/pretrained/deit_micro.safetensors" in names and len(recipes) > 100


def test_a_fresh_install_runs_a_recipe_offline(built, tmp_path):
    """The wheel in an empty environment; then, without a network or a checkout, a recipe on the shipped weights."""
    uv = shutil.which("uv", path=os.path.dirname(sys.executable))
    if uv is None:
        pytest.skip("uv is not installed beside this Python")
    (wheel,) = built.glob("*.whl")
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    lock = tmp_path / "constraints.txt"  # the tested versions, without hashes
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    lock.write_text("\n".join(x.rstrip(" \\") for x in lines if "==" in x and not x.startswith((" ", "#"))))
    install = subprocess.run([uv, "pip", "install", "--quiet", "--python", python, "--constraint", lock, wheel], capture_output=True, text=True)  # fmt: skip
    if install.returncode and (
        "connect" in install.stderr or "Failed to fetch" in install.stderr or "dns" in install.stderr.lower()
    ):
        pytest.skip("no package index can be reached")
    assert install.returncode == 0, install.stderr
    check = [uv, "tool", "run", "twine", "check", "--strict", *(p for p in built.iterdir() if p.is_file())]
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr
    code = """
import fedlib, pathlib
assert "site-packages" in fedlib.__file__, fedlib.__file__
sizes = dict(rounds=1, num_train=100, num_test=50, num_clients=5, clients_per_round=2)
e = fedlib.recipe("reefl/table1", "smoke", method="reefl", **sizes)
print(fedlib.run(e, progress=False).summary["status"])
"""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FEDLIB", "PYTHONPATH"))}
    done = subprocess.run([python, "-c", code], cwd=tmp_path, env=kept | offline, capture_output=True, text=True)
    assert done.stdout.strip() == "finished", done.stderr
    assert len(list((tmp_path / "outputs" / "runs").iterdir())) == 1
