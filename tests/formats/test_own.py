"""Data of one's own: objects under a name, folders of ``save_to_disk``, ids of the hub; known by their content."""

import re
import warnings

import datasets as hf
import numpy as np
import pandas as pd
import pytest
import torch
import torchvision
from PIL import Image

from fedlib import register_data, run
from fedlib.data.datasets import load_dataset, source_key
from fedlib.data.federated import load_federated
from fedlib_lab.formats import readers
from fedlib_lab.formats.own import content_digest
from fedlib_lab.runs.identity import OtherInputs
from tests.helpers.stored import ONE, small

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (60, 32, 32), dtype=np.uint8), np.arange(60) % 3
PLAIN = dict(dataset="mine", num_train=None, num_test=None, rounds=1)


@pytest.fixture(autouse=True)
def apart(cache, monkeypatch):
    monkeypatch.setattr("fedlib_lab.formats.readers.OWN_DATA", {})


def table(rows=slice(None), **more):
    images = [Image.fromarray(x) for x in X[rows]]
    features = {"image": hf.Image(), "label": hf.ClassLabel(names=["a", "b", "c"])} | {k: hf.Value("int64") for k in more}  # fmt: skip
    return hf.Dataset.from_dict({"image": images, "label": Y[rows]} | more, features=hf.Features(features))


class TorchvisionSet:
    """What torchvision's sets are without a transform."""

    classes = ["a", "b", "c"]

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return Image.fromarray(X[i]), int(Y[i])


FORMS = {
    "a pair of arrays": ((X[:40], Y[:40]), (X[40:], Y[40:])),
    "tensors": ((torch.from_numpy(X[:40, None]), torch.from_numpy(Y[:40])), (torch.from_numpy(X[40:, :, :, None]), torch.from_numpy(Y[40:]))),
    "a Dataset": (table(slice(40)), table(slice(40, 60))),
    "a DatasetDict": (hf.DatasetDict(train=table(slice(40)), test=table(slice(40, 60))), None),
    "torchvision's": (TorchvisionSet(), (X[40:], Y[40:])),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_what_is_registered_is_a_data_set(form):
    train, test = FORMS[form]
    data = load_dataset(register_data("mine", train, test, None if "data" in form.lower() else ["a", "b", "c"]))
    assert torch.equal(data.train_inputs, torch.from_numpy(X[:40, None])) and data.classes == ("a", "b", "c")
    assert torch.equal(data.test_inputs, torch.from_numpy(X[40:, None]))
    assert data.train_labels.tolist() == Y[:40].tolist() and data.test_labels.tolist() == Y[40:].tolist()


def test_a_run_of_it_is_known_by_its_content(tmp_path):
    """The same arrays again are the same run; others under the same name are refused."""
    e = small("fedavg", **PLAIN)
    register_data("mine", (X, Y))
    done = run(e, ONE, tmp_path, progress=False)
    assert done.summary["num_examples"] == 54  # a tenth is held out
    register_data("mine", (X.copy(), Y.copy()))
    assert run(e, ONE, tmp_path, progress=False, on_round=lambda r: 1 / 0).accuracy == done.accuracy
    register_data("mine", (255 - X, Y))
    with pytest.raises(OtherInputs, match="the data of 'mine'"):
        run(e, ONE, tmp_path)


def test_a_dataset_is_known_by_what_it_holds_and_not_by_how_it_came(tmp_path):
    """A map whose function read something else has the same fingerprint; a picture's file may be another."""
    dark, light = table().map(lambda row: {"label": 0}), table().map(lambda row: {"label": 1})
    light._fingerprint = dark._fingerprint
    seen = [load_dataset(register_data("mine", t)).train_labels.unique().tolist() for t in (dark, light)]
    assert seen == [[0], [1]] and content_digest(dark) == content_digest(
        table().map(lambda row: {"label": row["label"] * 0})
    )
    file = tmp_path / "one.png"
    cells = hf.Dataset.from_dict({"image": [str(file)] * 20, "label": [0, 1] * 10}).cast_column("image", hf.Image())
    found = []
    for shade in (10, 200):
        Image.fromarray(np.full((8, 8), shade, np.uint8)).save(file)
        found.append(load_dataset(register_data("mine", cells)).train_inputs.unique().tolist())
    assert found == [[10], [200]]


@pytest.mark.parametrize("kind", ["arrays", "tensors"])
def test_what_becomes_of_arrays_after_they_were_registered_changes_nothing(kind):
    x, y = (X.copy(), Y.copy()) if kind == "arrays" else (torch.from_numpy(X.copy()), torch.from_numpy(Y.copy()))
    register_data("mine", (x, y), (x, y))
    x[:], y[:] = 7, 0
    data = load_dataset("mine")
    assert torch.equal(data.train_inputs[:, 0], torch.from_numpy(X)) and data.test_labels.tolist() == Y.tolist()


def test_a_folder_of_save_to_disk_is_a_data_set(tmp_path):
    hf.DatasetDict(train=table(slice(40)), test=table(slice(40, 60))).save_to_disk(tmp_path / "both")
    table().save_to_disk(tmp_path / "one")
    both, one = load_dataset(str(tmp_path / "both")), load_dataset(str(tmp_path / "one"))
    assert torch.equal(both.test_inputs, torch.from_numpy(X[40:, None])) and both.classes == ("a", "b", "c")
    assert len(one.train_labels) == 54 and len(one.test_labels) == 6
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"no arrow")
    with pytest.raises(ValueError, match="is no whole folder of save_to_disk"):
        load_dataset(str(tmp_path / "one"))


def test_an_id_of_the_hub_is_the_set_of_that_name():
    assert source_key("uoft-cs/cifar10") == source_key("cifar10") != source_key("uoft-cs/cifar100")
    with pytest.raises(ValueError, match="'nyu-mll/glue' is unknown"):  # which of its sets?
        load_dataset("nyu-mll/glue")


@pytest.mark.parametrize(
    "name, train, sentence",
    [
        ("cifar10", (X, Y), "name = 'cifar10' is the kit's"),
        ("a/b", (X, Y), "is the kit's, or no word"),
        ("mine", (X.astype(float), Y), "inputs are float64 .* allowed: uint8 images"),
        ("mine", (X, Y[:5]), r"labels int64 \(5,\), inputs"),
        ("mine", (X, Y - 1), "labels -1 to 1; allowed: 0 to 2"),
        ("mine", "folder", "'str' is no data set"),
        ("mine", 3, "'int' is no data set"),
        ("mine", None, "'NoneType' is no data set"),
        ("mine", [1, 2], r"labels int64 \(\), inputs"),
        ("mine", hf.DatasetDict(test=table()), "no split named 'train'; found test"),
    ],
)
def test_what_is_no_data_set_is_refused(name, train, sentence):
    with pytest.raises(ValueError, match=sentence):
        register_data(name, train, classes=["a", "b", "c"])
    assert "mine" not in readers.OWN_DATA


def test_a_class_is_tested_only_where_it_is_trained():
    """Lists of classes may have more than either split has."""

    def rows(labels, *names):
        features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=list(names)))
        images = [Image.fromarray(x) for x in X[: len(labels)]]
        return hf.Dataset.from_dict({"image": images, "label": labels}, features)

    train = rows([0, 1] * 10, "a", "b", "c", "d")
    assert load_dataset(register_data("mine", train, rows([1, 0], "a", "b", "c", "d"))).classes == ("a", "b", "c", "d")
    assert load_dataset(register_data("mine", train, rows([1, 2], "z", "a", "b"))).test_labels.tolist() == [0, 1]
    told = "mine: split 'test' has labels that 'train' has not: {}; allowed: classes with an example to train on"
    for test, names in ((rows([2, 0, 3], "a", "b", "c", "d"), "c, d"), (rows([0, 1], "z", "a"), "z")):
        with pytest.raises(ValueError, match=f"^{told.format(names)}$"):
            load_dataset(register_data("mine", train, test))
    with pytest.raises(ValueError, match=f"^{told.format('owl')}$"):
        register_data("mine", (X[:20], np.arange(20) % 2), (X[:3], np.arange(3)), ["cat", "dog", "owl"])


def test_a_class_that_is_not_on_both_sides_of_the_held_out_tenth_is_said():
    told = "mine: a tenth is held out to test on, whatever the class, and of {} all examples are on one side"
    for labels, names in (([0] * 59 + [2], ["owl"]), ([2] + [1] * 59, ["owl"]), ([0, 1] + [2] * 58, ["cat", "dog"])):
        said = f"{len(names)} of 3 classes ({', '.join(names)})"
        with pytest.warns(UserWarning, match=f"^{re.escape(told.format(said))}$"):
            register_data("mine", (X, np.array(labels)), classes=["cat", "dog", "owl"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_data("mine", (np.repeat(X, 10, 0), np.arange(600) % 3))


@pytest.mark.parametrize("which", ["transform", "target_transform"])
def test_a_transform_of_torchvisions_is_refused(which):
    """A random flip was drawn once, and each picture kept what it got."""
    given = torchvision.datasets.FakeData(40, (3, 8, 8), 3, **{which: lambda x: x})
    with pytest.raises(ValueError, match="mine: the FakeData has a transform, drawn once for all; allowed: .*torchvis"):
        register_data("mine", given)


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("how", ["with_transform", "set_transform", "with a partitioner"])
def test_a_transform_that_would_not_be_applied_is_refused(how, split):
    from flwr_datasets.partitioner import IidPartitioner

    splits = {"train": table(slice(40)), "test": table(slice(40, 60))}
    if how == "set_transform":
        splits[split].set_transform(lambda rows: rows)
    else:
        splits[split] = splits[split].with_transform(lambda rows: rows)
    told = f"mine: split '{split}' has a transform .*, which is not applied; allowed: the rows that .map"
    with pytest.raises(ValueError, match=told):
        register_data("mine", **splits, partitioner=IidPartitioner(4) if how == "with a partitioner" else None)
    with pytest.raises(ValueError, match=told):
        register_data("mine", hf.DatasetDict(splits))


@pytest.mark.parametrize("ids", ["train", "test"])
def test_token_ids_beside_images_are_refused(ids):
    given = {"train": (X[:40], Y[:40]), "test": (X[40:], Y[40:])}
    given[ids] = (given[ids][1][:, None] + np.arange(16), given[ids][1])
    with pytest.raises(
        ValueError, match="^mine: images in one of train and test, and token ids in the other; allowed: one"
    ):
        register_data("mine", **given)


def test_a_client_is_tested_on_its_owner_s_examples():
    """Owners 0, 1 and 2 of twenty examples each; a tenth of each is held out, two rows."""
    register_data("mine", table(writer_id=np.arange(60) // 20))
    e = small("fedavg", **PLAIN, partition="natural_split", num_clients=6, test_split="owner")
    data = load_federated(e)
    owners, tests = data.client_owners(), [data.client_test(i) for i in range(6)]
    assert [len(t) for t in tests] == [2] * 6
    assert all((data.test_owners[t] == o).all() for t, o in zip(tests, owners, strict=True))
    for changes, sentence in (
        ({"partition": "iid"}, "but with partition = 'iid'; allowed: data whose examples have owners"),
        ({"dataset": "mnist"}, "but mnist says no owners of its test examples"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load_federated(e.replace(**changes))


def test_owners_are_compared_by_name():
    """The numbers of names are each split's own: bob is 1 of the training split's and 0 of the test split's."""
    names = [["ann", "bob", "cem"], ["bob", "zoe", "cem"]]
    train, test = (
        table(rows, writer_id=owners).cast_column("writer_id", hf.ClassLabel(names=of))
        for rows, owners, of in ((slice(30), [0, 1, 2] * 10, names[0]), (slice(30, 36), [0, 1, 2] * 2, names[1]))
    )
    data = load_dataset(register_data("mine", train, test))
    assert data.owners.tolist() == [0, 1, 2] * 10 and data.test_owners.tolist() == [1, -1, 2] * 2
    words = test.remove_columns("writer_id").add_column("writer_id", ["cem", "ann", "eve"] * 2)
    assert load_dataset(register_data("mine", train, words)).test_owners.tolist() == [2, 0, -1] * 2
    nobody = table(slice(30), writer_id=[0, 1, -1] * 10).cast_column("writer_id", hf.ClassLabel(names=names[0]))
    with pytest.raises(ValueError, match="mine, split 'train', row 2: writer_id = -1 is none of the 3 classes"):
        load_dataset(register_data("mine", nobody))


def test_a_partitioner_of_flwr_datasets_says_who_the_clients_are(tmp_path):
    """Each client holds the rows of its part, be they drawn or sorted; the same division again is the same run."""
    from flwr_datasets.partitioner import DirichletPartitioner, ShardPartitioner

    of = {"dirichlet": lambda: DirichletPartitioner(4, "label", 0.5, min_partition_size=2, seed=3),
          "shards": lambda: ShardPartitioner(4, "label", num_shards_per_partition=2, shard_size=5)}  # fmt: skip
    e = small("fedavg", **PLAIN, partition="natural", num_clients=4, clients_per_round=2)
    images = {x.tobytes(): i for i, x in enumerate(X[:40])}
    for name, make in of.items():
        alone = make()
        alone.dataset = table(slice(40), writer_id=np.zeros(40, int)).add_column("row", list(range(40)))
        wanted = {tuple(sorted(alone.load_partition(i)["row"])) for i in range(4)}
        register_data("mine", table(slice(40), writer_id=np.zeros(40, int)), table(slice(40, 60)), partitioner=make())
        data = load_federated(e)
        rows = [data.inputs[data.client(c)].numpy() for c in range(4)]
        assert {tuple(sorted(images[x.tobytes()] for x in held)) for held in rows} == wanted, name
        first = run(e, ONE, tmp_path / name, progress=False)
        register_data("mine", table(slice(40)), table(slice(40, 60)), partitioner=make())
        assert run(e, ONE, tmp_path / name, progress=False).path == first.path
    register_data("mine", table(slice(40)), table(slice(40, 60)), partitioner=of["dirichlet"]())
    with pytest.raises(OtherInputs, match="data"):
        run(e, ONE, tmp_path / "shards", progress=False)


@pytest.mark.parametrize(
    "train, partitioner, sentence",
    [
        ((X, Y), object(), "mine: a partitioner divides a datasets.Dataset, and this is a tuple"),
        (table(), object(), "mine: the partitioner cannot divide it: 'object' object has no attribute 'dataset'"),
    ],
)
def test_what_a_partitioner_cannot_divide_is_refused(train, partitioner, sentence):
    with pytest.raises(ValueError, match=sentence):
        register_data("mine", train, partitioner=partitioner)


class Parts:
    """A partitioner of one's own: the rows of each part."""

    def __init__(self, *rows):
        self.rows, self.num_partitions = rows, len(rows)

    def load_partition(self, i):
        return {"its row": self.rows[i]}


@pytest.mark.parametrize("parts, sentence", [
    ((range(6), range(5, 9)), "mine: row 5 is in parts 0 and 1; allowed: in one, once"),
    (([0, 1, 1],), "mine: row 1 is in parts 0 and 0; allowed: in one, once"),
    (([0], [-1]), "mine: part 1 has rows [-1]; allowed: 0 to 59"), (([0, 60],), "mine: part 0 has rows [0, 60]; allowed: 0 to 59"),
    (([0.0, 1.5],), "mine: part 0 has rows [0.0, 1.5]; allowed: 0 to 59"), (([True],), "mine: part 0 has rows [True]; allowed"),
    ((None,), "mine: part 0 has rows [None]; allowed"),
])  # fmt: skip
def test_a_row_belongs_to_one_part_at_most(parts, sentence):
    """Before, who came last had what two parts held, and -1 was the last row."""
    with pytest.raises(ValueError, match=re.escape(sentence)):
        register_data("mine", table(), partitioner=Parts(*parts))


def test_rows_of_no_part_are_said():
    with pytest.warns(UserWarning, match="mine: 20 of 60 rows are in no part and not used"):
        register_data("mine", table(), partitioner=Parts(range(20), range(40, 60)))


@pytest.mark.parametrize("train, classes, sentence", [
    (([[1, 2], [3]], [0, 1]), None, "mine: setting an array element with a sequence"),
    (pd.DataFrame({"text": ["a"], "label": [0]}), None, "mine: 'DataFrame' is no data set; allowed: a datasets.Dataset"),
    ((X, Y), 3, "mine: classes = 3; allowed: a list of names"), ((X, Y), "abc", "mine: classes = 'abc'; allowed: a list"),
])  # fmt: skip
def test_what_is_no_pair_of_arrays_is_refused_by_name(train, classes, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        register_data("mine", train, classes=classes)


def test_classes_without_an_example_are_said():
    """Labels that begin at 1, or leave numbers out, make a net of more classes than there are; one class is always right."""
    y = np.arange(60) % 3
    for labels, told in ((y + 1, r"1 of 4 classes \(0\) have no example"), (2 * y, r"2 of 5 classes \(1, 3\) have"),
                         (0 * y, "mine: all examples are of one class")):  # fmt: skip
        with pytest.warns(UserWarning, match=told):
            register_data("mine", (X, labels), (X, labels))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_data("mine", (X, y), (X[:9], y[:9]))


def test_test_examples_that_are_trained_on_are_said(tmp_path):
    """Copies of a picture fall on both sides of a split; what is learned by heart counted as learned, in silence."""
    said, x, y = (
        r"^{}: {} test inputs are training inputs too$",
        RNG.integers(0, 256, (300, 8, 8), np.uint8),
        np.arange(300) % 3,
    )
    with pytest.warns(UserWarning, match=said.format("mine", "3 of 120")):
        register_data("mine", (x[117:], y[117:]), (x[:120], 2 - y[:120]))
    with pytest.warns(UserWarning, match=said.format("mine", "150 of 150")):  # a tenth, held out of five copies of each
        register_data("mine", (np.repeat(x, 5, 0), np.repeat(y, 5)))
    words = hf.Dataset.from_dict({"sentence": [f"word {i}" for i in range(200)], "label": [0, 1] * 100})
    for name in ("own", "sst2"):  # of a public set it is as everybody has it
        words.to_parquet(tmp_path / name / "train.parquet")
        words.select(range(100)).to_parquet(tmp_path / name / "test.parquet")
    with pytest.warns(UserWarning, match=said.format(tmp_path / "own", "100 of 100")):
        load_dataset(str(tmp_path / "own"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_dataset(str(tmp_path / "sst2"))


def test_fractions_are_no_classes_of_pictures():
    """Of text they are numbers to predict; 60 ages would be 60 classes."""
    cells = {"image": [Image.fromarray(x) for x in X], "label": [i / 2 for i in range(60)]}
    features = hf.Features(image=hf.Image(), label=hf.Value("float64"))
    register_data("mine", hf.Dataset.from_dict(cells, features=features))
    with pytest.raises(ValueError, match="row 1: label = 0.5 is no class; allowed: 0 and above, or names"):
        load_dataset("mine")


ALIKE = {
    "how é is written": (("caf\u00e9", "cafe\u0301"), r"'caf\\xe9' and 'cafe\\u0301'|'cafe\\u0301' and 'caf\\xe9'"),
    "a space": (("cat", "cat "), "'cat' and 'cat '"),
    "case": (("Cat", "cat"), "'Cat' and 'cat'"),
}


@pytest.mark.parametrize("what", ALIKE)
def test_names_that_look_alike_are_said(what, tmp_path):
    """Of classes that arrays, cells, and folders name. Letters differ by case (EMNIST's)."""
    names, told = ALIKE[what]
    y = np.arange(60) % 2
    words = hf.Dataset.from_dict({"text": ["a b"] * 60, "label": [names[i] for i in y]})
    for i in range(60):
        (tmp_path / names[i % 2]).mkdir(exist_ok=True)
        Image.fromarray(X[i]).save(tmp_path / names[i % 2] / f"{i}.png")
    register_data("words", words)
    for read in (lambda: register_data("mine", (X, y), None, list(names)), lambda: load_dataset("words"),
                 lambda: load_dataset(str(tmp_path))):  # fmt: skip
        with pytest.warns(UserWarning, match=f"classes ({told}) look alike and are not the same") as said:
            read()
        assert sum("look alike" in str(w.message) for w in said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_data("mine", (X[:40], y[:40]), (X[40:], y[40:]), ["a", "A"])


def test_test_examples_of_owners_who_train_on_nothing_are_said():
    own = {"text": ["a b"] * 40, "label": ["x", "y"] * 20}
    train, test = (hf.Dataset.from_dict(own | {"client_id": ["bob", w] * 20}) for w in ("amy", "eve"))
    register_data("mine", train, test)
    with pytest.warns(UserWarning, match="mine: 20 of 40 test examples' owners train on none"):
        assert load_dataset("mine").test_owners.tolist() == [1, -1] * 20


def test_owners_that_look_alike_are_said():
    """Also where one is in training and the other in the test: nobody would be tested on it."""
    own = {"text": ["a b"] * 40, "label": ["x", "y"] * 20}
    train, test = (hf.Dataset.from_dict(own | {"client_id": ["bob", w] * 20}) for w in ("amy", "amy "))
    register_data("mine", train, test)
    with pytest.warns(UserWarning, match="owners 'amy' and 'amy ' look alike and are not the same"):
        load_dataset("mine")


def test_arrays_of_unequal_shapes_are_said_and_a_mapping_is_refused():
    """Test pictures of another size or of colours were brought to the net's input without a word."""
    colour = np.repeat(X[:20, None, :4], 3, 1)
    with pytest.warns(UserWarning, match=r"unequal shapes, \[\(1, 32, 32\), \(3, 4, 32\)\]"):
        register_data("mine", (X, Y), (colour, Y[:20]))
    with pytest.raises(ValueError, match="mine: 'dict' is no data set; allowed: a datasets.Dataset or"):
        register_data("mine", {"images": X, "labels": Y})


def test_columns_beside_those_that_are_read_are_said():
    """Only those that could be read in place of others were: a ``user_id`` was nobody's, and no word of it."""
    rows = {"text": ["good", "bad"] * 20, "label": [1, 0] * 20, "user_id": [0, 1] * 20, "labels": [0, 1] * 20}
    register_data("rows", hf.Dataset.from_dict(rows))
    told = "trained on split 'train' by 'label', tested on examples held out of it; not used: column 'user_id', column"
    with pytest.warns(UserWarning, match=told):
        load_dataset("rows")


@pytest.mark.parametrize(("labels", "said"), [([1.0, 0.0], True), ([1.5, 0.0], False), ([1, 0], False)])
def test_classes_that_a_table_reader_made_fractions_are_said_to_be_numbers(labels, said):
    """pandas makes fractions of integers where a row lacks one, and the experiment was a regression without a word."""
    register_data("scored", hf.Dataset.from_dict({"text": ["good", "bad"] * 20, "label": labels * 20}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_dataset("scored")
    told = [str(w.message) for w in caught if "are numbers to predict, not classes" in str(w.message)]
    assert told == ["scored: label = 1.0 and the like are numbers to predict, not classes, as their type is float64; "
                    "classes are integers or words"] * said  # fmt: skip
