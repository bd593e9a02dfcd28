"""Checkpoints and data sets in the layouts of the hubs, tiny: what profile ``paper`` loads, without its downloads.

``prepare(folder)`` writes them; ``rehearse(folder, notebooks, overrides)`` runs the cells of notebooks on them, through
the loading code that the real ones take, offline. Shapes of the checkpoints are small, and so is what their names stand
for in this process. ``python -m tests.helpers.stand_ins FOLDER [NOTEBOOK ...] [FIELD=JSON ...]`` does both, of no
notebook all; ``--prepare`` in place of notebooks writes the stand-ins alone.
"""

import io
import json
import os
import sys
import time
import wave
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    str(p.relative_to(ROOT / "notebooks").with_suffix(""))
    for paper in ("cafedistill", "fedepth", "raffm", "reefl", "scalefl")
    for p in (ROOT / "notebooks" / paper).glob("*.ipynb")
)
ONE_BATCH = {"rounds": 2, "local_epochs": 1, "clients_per_round": 4, "seed": 1}  # a client has a batch at most
OF_ITS_OWN = {"fedepth/unbalanced_partitions": {"num_clients": 5}}  # whose partition gives each 50 examples
WORDS = "a film that is not bad and the plot was good but who can say why it had to end so soon number0 number1 + - ( )".split()
PAIRS = {
    "mrpc": ("sentence1", "sentence2"), "stsb": ("sentence1", "sentence2"), "rte": ("sentence1", "sentence2"),
    "qqp": ("question1", "question2"), "qnli": ("question", "sentence"), "mnli": ("premise", "hypothesis"),
    "cola": ("sentence",),
}  # fmt: skip
VOCABULARY = 300
rng = np.random.default_rng(0)


def prepare(folder: Path) -> None:
    """Write all stand-ins below ``folder``: data by their hub names in ``hub``, local copies in ``data``."""
    images(folder / "hub/uoft-cs/cifar10/plain_text", "img", {"label": 10}, 32, train=400, test=60)
    images(
        folder / "hub/uoft-cs/cifar100/cifar100",
        "img",
        {"fine_label": 100, "coarse_label": 20},
        32,
        train=400,
        test=100,
    )
    images(folder / "hub/zh-plus/tiny-imagenet/data", "image", {"label": 200}, 64, train=400, valid=200)
    images(folder / "hub/nelorth/oxford-flowers/data", "image", {"label": 102}, (90, 70), train=306, test=102)
    images(folder / "hub/flwrlabs/femnist/data", "image", {"character": 62}, 28, owners=381, train=381 * 10)
    sentences(folder / "hub/stanfordnlp/sst2/data", ("sentence",), 2, train=300, validation=40)
    sentences(folder / "hub/fancyzhx/ag_news/data", ("text",), 4, train=400, test=40)
    for name, reads in PAIRS.items():
        test = "validation_matched" if name == "mnli" else "validation"
        classes = {"stsb": None, "mnli": 3}.get(name, 2)
        sentences(folder / f"hub/nyu-mll/glue/{name}", reads, classes, **{"train": 300, test: 40})
    configs(folder / "hub/nyu-mll/glue", PAIRS)
    questions(folder / "hub/rajpurkar/squad/plain_text", 0, train=300, validation=40)
    questions(folder / "hub/rajpurkar/squad_v2/squad_v2", 3, train=300, validation=40)
    problems(folder / "hub/ChilleD/SVAMP/data", train=60, test=20)
    speech(folder / "data/speech_commands", speakers=250)
    image_folders(folder / "data/imagenet", classes=10, train=100, val=5)
    checkpoints(folder)


def write(folder: Path, columns: dict, features: dict, split: str) -> None:
    from datasets import Dataset, Features

    folder.mkdir(parents=True, exist_ok=True)
    table = Dataset.from_dict(columns, features=Features(features))
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def configs(repository: Path, names) -> None:
    """The card of a repository with several sets, as `datasets` reads it."""
    lines = ["---", "configs:"]
    for name in names:
        splits = sorted({p.stem.split("-")[0] for p in (repository / name).glob("*.parquet")})
        lines += [f"- config_name: {name}", "  data_files:"]
        lines += [line for s in splits for line in (f"  - split: {s}", f"    path: {name}/{s}-*")]
    (repository / "README.md").write_text("\n".join([*lines, "---", ""]))


def images(folder: Path, column: str, labels: dict[str, int], size, owners: int = 0, **splits: int) -> None:
    from datasets import ClassLabel, Image, Value

    features = {column: Image(), **{k: ClassLabel(num_classes=n) for k, n in labels.items()}}
    features |= {"writer_id": Value("string")} if owners else {}
    height, width = size if isinstance(size, tuple) else (size, size)
    grey = () if owners else (3,)
    for split, n in splits.items():
        columns = {column: list(rng.integers(0, 256, (n, height, width, *grey), dtype=np.uint8))}
        columns |= {k: [i % c for i in range(n)] for k, c in labels.items()}
        columns |= {"writer_id": [f"f{i % owners:04d}" for i in range(n)]} if owners else {}
        write(folder, columns, features, split)


def image_folders(folder: Path, classes: int, **splits: int) -> None:
    """ImageNet as it is unpacked: a folder for each split, in it one for each class; images of several sizes."""
    from PIL import Image

    for split, n in splits.items():
        for c in range(classes):
            place = folder / split / f"n{c:08d}"
            place.mkdir(parents=True)
            for i in range(n):
                pixels = rng.integers(0, 256, (40 + i % 20, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"n{c:08d}_{i}.JPEG")


def text(words: int) -> str:
    return " ".join(rng.choice(WORDS, words))


def sentences(folder: Path, reads: tuple[str, ...], classes: int | None, **splits: int) -> None:
    from datasets import ClassLabel, Value

    features = {c: Value("string") for c in reads}
    features["label"] = ClassLabel(num_classes=classes) if classes else Value("float32")
    for split, n in splits.items():
        columns = {c: [text(12) for _ in range(n)] for c in reads}
        columns["label"] = [i % classes for i in range(n)] if classes else list(rng.uniform(0, 5, n))
        write(folder, columns, features, split)


def questions(folder: Path, unanswerable: int, **splits: int) -> None:
    """SQuAD; of the second every n-th cannot be answered."""
    from datasets import List, Value

    answers = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
    features = {k: Value("string") for k in ("id", "title", "context", "question")} | {"answers": answers}
    for split, n in splits.items():
        contexts, given = [text(40) for _ in range(n)], []
        for i, context in enumerate(contexts):
            word = context.split()[i % 30]
            none = unanswerable and i % unanswerable == 0
            given.append({"text": [] if none else [word], "answer_start": [] if none else [context.index(word)]})
        columns = {"id": [str(i) for i in range(n)], "title": ["t"] * n, "context": contexts}
        write(folder, columns | {"question": [text(8) for _ in range(n)], "answers": given}, features, split)


def problems(folder: Path, **splits: int) -> None:
    from datasets import Value

    features = dict.fromkeys(("ID", "Body", "Question", "Equation", "Answer", "Type"), Value("string"))
    for split, n in splits.items():
        columns = {k: [text(10) for _ in range(n)] for k in features}
        write(folder, columns | {"Equation": ["( number0 - number1 )"] * n}, features, split)


def speech(folder: Path, speakers: int) -> None:
    """SpeechCommands: of every speaker five clips of one word."""
    from datasets import ClassLabel, Value

    rows = range(5 * speakers)
    features = {"file": Value("string"), "audio": {"bytes": Value("binary"), "path": Value("string")}}
    features |= {"label": ClassLabel(num_classes=35), "is_unknown": Value("bool"), "speaker_id": Value("string")}
    columns = {"file": [f"{i}.wav" for i in rows], "audio": [{"bytes": wav(), "path": f"{i}.wav"} for i in rows]}
    columns |= {"label": [i // 5 % 35 for i in rows], "is_unknown": [False] * len(rows)}
    write(folder, columns | {"speaker_id": [f"s{i // 5}" for i in rows]}, features, "train")


def wav() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1), out.setsampwidth(2), out.setframerate(16_000)
        out.writeframes(rng.integers(-9000, 9000, 1600, dtype=np.int16).tobytes())
    return file.getvalue()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def smaller() -> dict:
    """Every published shape of transformers' with its heads, at most twelve units, and four features a head."""
    from fedlib_lab.zoo.foreign_specs import FOREIGN

    def of(spec):
        sizes = {
            "depth": min(spec.depth, 12),
            "dim": 4 * spec.heads,
            "ffn_dim": 16 * spec.heads,
            "head_dim": spec.head_dim and 4,
        }
        if spec.reads == "images":
            return replace(spec, **sizes, img_size=32, patch_size=8)
        return replace(spec, **sizes, vocab_size=VOCABULARY, own_words=spec.tokenizer is None)

    return {name: of(spec) for name, spec in FOREIGN.items() if spec.source}


def checkpoints(folder: Path) -> None:
    """Transformers' and Vision Mamba's in the hub's cache, timm's in folders of ``save_for_hf``."""
    import timm
    import torch
    from timm.models import save_for_hf

    from fedlib_lab.zoo.foreign_loading import build_model
    from fedlib_lab.zoo.vim import VimSpec
    from tests.zoo.test_vim import published

    for spec in {s.source: s for s in smaller().values()}.values():
        place = in_hub(folder, spec.source)
        build_model(spec).save_pretrained(place)
        if spec.reads == "tokens":
            words(spec).save_pretrained(place)
    for size, heads in (("tiny", 3), ("small", 6), ("base", 12)):
        for name in (f"deit_{size}_patch16_224", f"vit_{size}_patch16_224"):
            given = {"img_size": 32, "patch_size": 8, "embed_dim": 4 * heads, "num_heads": heads}
            net = timm.create_model(name, pretrained=False, **given)
            place = folder / "data/backbones" / name
            save_for_hf(net, place, model_args=given, safe_serialization=True)
    vim = published(VimSpec(img_size=32, patch_size=8, dim=12, depth=24))
    torch.save({"model": vim}, in_hub(folder, "hustvl/Vim-tiny-midclstok") / "vim_t_midclstok_76p1acc.pth")


def in_hub(folder: Path, repository: str) -> Path:
    """Where the hub's client keeps the one revision of ``repository``."""
    place, revision = folder / "hf/hub" / f"models--{repository.replace('/', '--')}", "0" * 40
    (place / "refs").mkdir(parents=True, exist_ok=True)
    (place / "refs/main").write_text(revision)
    (place / "snapshots" / revision).mkdir(parents=True, exist_ok=True)
    return place / "snapshots" / revision


def words(spec):
    """A tokenizer of ``WORDS`` that marks rows as the family's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    family = {"roberta": ("<s>", "</s>", "<pad>"), "t5": (None, "</s>", "<pad>"), "llama": ("<s>", "</s>", None)}
    begin, end, pad = family.get(spec.family, ("[CLS]", "[SEP]", "[PAD]"))
    number = {"\n": 7, "[UNK]": 8, **{w: 10 + i for i, w in enumerate(dict.fromkeys(WORDS))}}
    number |= {pad: spec.padding or 0} if pad else {}
    if pad is None:  # LLaMA's rows are filled with their end
        number[end] = spec.padding
    free = iter(i for i in range(7) if i not in number.values())
    number |= {mark: next(free) for mark in (begin, end) if mark and mark not in number}
    tokenizer = Tokenizer(models.WordLevel(number, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    first, marks = [begin] if begin else [], [(m, number[m]) for m in (begin, end) if m]
    single = [*first, "$A", end]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1", f"{end}:1"], special_tokens=marks
    )
    named = {"bos_token": begin, "eos_token": end, "pad_token": pad, "unk_token": "[UNK]"}
    if spec.family not in ("t5", "llama"):
        named |= {"cls_token": begin, "sep_token": end}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **{k: v for k, v in named.items() if v})


# --- notebooks -------------------------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """Of a process that has the stand-ins and nothing else."""
    mine = {
        "FEDLIB_DATA": str(folder / "data"), "FEDLIB_CACHE": str(folder / "cache"), "HF_HOME": str(folder / "hf"),
        "FEDLIB_OUTPUTS": str(folder / "outputs"), "FEDLIB_ROOT": str(ROOT), "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg",
        "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1",
    }  # fmt: skip
    return {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "FEDLIB_"))} | mine


def of_published_shapes(function):
    """``function`` where names of backbones stand for what is published."""
    from fedlib.models.registry import OWN, SHIPPED

    def there(*args):
        with mock.patch.dict(OWN, SHIPPED), mock.patch.dict(os.environ, FEDLIB_DATA=os.devnull):
            return function(*args)

    return there


def rehearse(folder: Path, names: list[str], overrides: dict, columns: int, modes: int = 1) -> dict[str, str]:
    """What fails of the notebooks ``names`` at profile ``paper``: the error, by name. Runs in :func:`environment`.

    Of every table the first ``columns`` columns and fine-tuning modes, unless a notebook asks for others.
    """
    import matplotlib.pyplot as plt

    from fedlib.models.registry import OWN
    from fedlib_lab.runs import costs, params
    from fedlib_lab.zoo.vim import VIMS

    load = params.load_spec
    costs.upload_mib = of_published_shapes(costs.upload_mib)  # which notebooks compare with what is printed

    def first(paper: str, table: str) -> dict:
        spec = load(paper, table)
        spec["axes"] = {**spec["axes"], "finetune": params._listed(spec["axes"]["finetune"])[:modes]}
        own = spec.get("paper", {})
        if "columns" in own:
            spec["paper"] = {**own, "columns": own["columns"][:columns]}
        else:
            spec["paper"] = {**own, "columns": list(spec["columns"])[:columns]}
        return spec

    params.load_spec = first

    OWN.update(smaller())
    for vims in (OWN, VIMS):
        vims |= {n: replace(s, img_size=32, patch_size=8, dim=12) for n, s in VIMS.items() if n.startswith("vim_tiny")}
    os.chdir(folder / "hub")  # where `datasets` finds a repository by its name before it asks the hub
    failed = {}
    for name in names:
        given = {"profile": "paper", "run_missing": True, "overrides": overrides | OF_ITS_OWN.get(name, {})}
        began = time.process_time()
        space = {"display": lambda *_: None, "__name__": "__main__"}
        cells = json.loads((ROOT / f"notebooks/{name}.ipynb").read_text())["cells"]
        try:
            for i, source in enumerate("".join(c["source"]) for c in cells if c["cell_type"] == "code"):
                exec(compile(source, f"{name}, cell {i}", "exec"), space)
                space |= given if i == 0 else {}
        except Exception as error:
            import traceback

            failed[name] = "".join(traceback.format_exception(error)[-4:])
        plt.close("all")
        print(f"{name}: {'FAILED ' if name in failed else ''}{time.process_time() - began:.0f} s of CPU", flush=True)
        if name in failed:
            print(failed[name], flush=True)
    return failed


if __name__ == "__main__":
    folder, asked = Path(sys.argv[1]).absolute(), [x for x in sys.argv[2:] if "=" not in x]
    extra = {k: json.loads(v) for k, v in (x.split("=", 1) for x in sys.argv[2:] if "=" in x)}
    if not (folder / "hf").is_dir():  # written last
        prepare(folder)
    if asked == ["--prepare"]:
        sys.exit()
    if os.environ.get("HF_HOME") != str(folder / "hf"):
        again = [sys.executable, "-m", "tests.helpers.stand_ins", str(folder), *sys.argv[2:]]
        os.execve(sys.executable, again, environment(folder))
    columns = extra.pop("first", 1)
    sys.exit(bool(rehearse(folder, asked or NAMES, {**ONE_BATCH, **extra}, columns)))
