"""The data of a federation: what is held out, who owns what, and what is refused."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from fedlib import Experiment, build_federation, register_data
from fedlib.data import federated
from fedlib.data.federated import _subset as subset_of
from fedlib.data.federated import check_task, hold_out, input_device, load_federated
from tests.helpers.sentences import write

pytestmark = pytest.mark.usefixtures("kept_cache")


@pytest.mark.parametrize(
    "values, message",
    [
        (
            {"public_fraction": 0.001},
            "public_fraction = 0.001 of every class's training examples rounds to none of these 200; allowed: 0, or more than 0.025",
        ),
        (
            {"validation_fraction": 0.02, "evaluate_on": "validation"},
            "validation_fraction = 0.02 of every class's training examples rounds to none of these 200",
        ),
        (
            {"validation_fraction": 0.99},
            "validation_fraction = 0.99 of every class's training examples leaves none of 200; allowed: less",
        ),
    ],
)
def test_a_split_that_rounds_to_nothing_is_refused(values, message):
    e = Experiment(num_train=200, num_test=20, finetune="frozen", **values)
    with pytest.raises(ValueError) as error:
        build_federation(e)
    assert message in str(error.value)


def test_a_drawn_client_holds_no_more_than_there_is():
    e = Experiment(partition="drawn", num_train=200, examples_per_client=201, finetune="frozen")
    with pytest.raises(ValueError, match="examples_per_client = 201 exceeds the 200 training examples"):
        build_federation(e)
    assert build_federation(e.replace(examples_per_client=200)).data.num_examples[0] == 200


def test_subset_is_balanced_and_the_same_for_every_seed():
    a, b = (load_federated(Experiment(num_train=500, num_clients=5, clients_per_round=2, seed=s)) for s in (1, 2))
    rows = set(a.holdings.indices.tolist())
    assert rows == set(b.holdings.indices.tolist()) and len(rows) == 500
    assert a.labels[a.holdings.indices].bincount().tolist() == [50] * 10
    assert a.label_counts().sum(1).tolist() == [100] * 5
    assert a.inputs is b.inputs  # the examples are shared by all experiments


# of 1,000 examples; by hand: what a tenth (or a half) of every class is, a class of 3 having less than half an example
@pytest.mark.parametrize(
    "sizes, n, proportional, balanced",
    [
        ([900, 100], 100, [90, 10], [50, 50]),
        ([700, 300], 500, [350, 150], [250, 250]),
        ([900, 97, 3], 100, [90, 10, 0], [49, 48, 3]),
        ([500, 500], 200, [100, 100], [100, 100]),
    ],
)
def test_a_subset_has_classes_in_proportion_or_balanced_by_name(sizes, n, proportional, balanced):
    labels = np.repeat(np.arange(len(sizes)), sizes)
    images = np.zeros((1000, 8, 8), np.uint8)
    register_data("uneven", (images, labels), (images, labels), classes=[*map(str, range(len(sizes)))])
    e = Experiment(dataset="uneven", num_train=n, num_test=n, num_clients=5, clients_per_round=2, partition="iid")
    for subset, wanted in {"proportional": proportional, "balanced": balanced}.items():
        data = load_federated(e.replace(subset=subset))
        found = [
            x.bincount(minlength=len(sizes)).tolist() for x in (data.labels[data.holdings.indices], data.test_labels)
        ]
        assert np.abs(np.array(found) - wanted).max() <= 1, (subset, found)
        held = load_federated(e.replace(subset=subset, validation_fraction=0.1, evaluate_on="validation"))
        assert np.abs(held.test_labels.bincount(minlength=len(sizes)).numpy() - np.array(wanted) / 10).max() <= 0.6
    with pytest.raises(ValueError, match="subset = 'balanced' has no effect without num_train or num_test"):
        Experiment(dataset="uneven", subset="balanced")


def test_where_classes_are_equally_large_both_subsets_are_the_same_rows():
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 50))
    for n in (7, 33, 100, 499):
        assert np.array_equal(subset_of(labels, n, "train"), subset_of(labels, n, "train", balanced=True))


def test_clients_know_their_owner(fake):
    e = fake()
    data = load_federated(e)
    assert data.client_owners().tolist() == [0, 0, 1, 1, 2, 2] and data.num_examples.tolist() == [5] * 6
    assert load_federated(e.replace(partition="iid")).client_owners() is None
    assert load_federated(e.replace(num_test=6)).test_owners.shape == (6,)


def test_labels_of_groups(fake):
    e = fake()
    data = load_federated(e.replace(label_groups=True))
    assert data.classes == ("a", "b")
    assert data.labels.tolist() == [0, 0, 1] * 10 and data.test_labels.tolist() == [0, 0, 1] * 4
    assert load_federated(e).classes == ("a/1", "a/2", "b/1")
    from fedlib_lab.runs.costs import num_classes

    assert [num_classes(e.replace(label_groups=g)) for g in (False, True)] == [3, 2]
    fake(classes=("1", "2", "3"))
    with pytest.raises(ValueError, match="label_groups = True, but the classes of 'fake' are not named group/class"):
        load_federated(e.replace(label_groups=True))


def test_what_has_no_classes_is_not_divided_by_class(tmp_path):
    pair = {"sentence1": ["a b"] * 20, "sentence2": ["d"] * 20, "label": [float(i) for i in range(20)]}
    e = Experiment(dataset=str(write(tmp_path / "set", train=pair, test=pair)), num_clients=4, clients_per_round=2)
    with pytest.raises(ValueError, match="partition = 'dirichlet' divides by class, but the labels of .* allowed: iid"):
        load_federated(e)
    with pytest.raises(ValueError, match="test_split = 'labels', but the labels of .* are no classes"):
        load_federated(e.replace(partition="iid", test_split="labels"))
    data = load_federated(e.replace(partition="iid", test_split="like_train", num_train=12, num_test=8), size=16)
    assert data.num_examples.tolist() == [3] * 4 and data.label_counts().shape == (4, 0)
    assert [len(data.client_test(i)) for i in range(4)] == [2] * 4 and data.test_labels.shape == (8,)


def test_labels_that_do_not_fit_the_task_are_refused_before_a_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlib.engine.federation.build_model", lambda *a, **k: pytest.fail("too late"))
    pair = {"sentence1": ["a b"] * 20, "sentence2": ["d"] * 20, "label": [float(i) for i in range(20)]}
    e = Experiment(
        dataset=str(write(tmp_path / "set", train=pair, test=pair)), partition="iid", num_clients=4, clients_per_round=2,
        backbone="bert_micro", pretrained=False, num_exits=3, augment="none",
    )  # fmt: skip
    with pytest.raises(ValueError, match="is taken for a Classification, but each of its labels is a number"):
        build_federation(e)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    three = pair | {"label": [i % 3 for i in range(20)]}
    write(tmp_path / "mrpc", train=three, test=three)
    with pytest.raises(ValueError, match="'mrpc' has 3 classes, and its f1 is of two"):
        build_federation(e.replace(dataset="mrpc"))


def test_words_of_which_the_second_is_the_negative_one_say_what_the_f1_is_of(tmp_path, monkeypatch):
    """Words are classes in the order of the alphabet; numbers are GLUE's own, of which 1 is the paraphrase."""
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    pair = {"sentence1": ["a b"] * 20, "sentence2": ["d"] * 20}
    for name, labels in {
        "mrpc": ["equivalent", "not_equivalent"],
        "qqp": ["Duplicate", "Not"],
        "cola": ["a", "not a"],
    }.items():
        write(tmp_path / name, train=(words := pair | {"label": labels * 10}), test=words)
        e = Experiment(dataset=name, partition="iid", num_clients=4, clients_per_round=2)
        with nullcontext() if name == "cola" else pytest.warns(match=f"{name}: its f1 is of class '{labels[1]}'"):
            check_task(e, load_federated(e, size=16))
    write(tmp_path / "mrpc", train=(plain := pair | {"label": [0, 1] * 10}), test=plain)
    check_task(e.replace(dataset="mrpc"), load_federated(e.replace(dataset="mrpc"), size=16))


def test_questions_without_an_answer_are_refused_where_an_empty_answer_would_score_nothing(tmp_path, monkeypatch):
    """Who answered all of them right had an F1 of 50."""
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    found, none = {"text": ["the cat"], "answer_start": [0]}, {"text": [], "answer_start": []}
    rows = {"question": ["who sat?"] * 8, "context": ["the cat sat"] * 8, "answers": [found, none] * 4}
    for name in ("squad", "squad_v2"):
        write(tmp_path / name, train=rows, test=rows)
    e = Experiment(
        dataset="squad", partition="iid", num_clients=2, clients_per_round=2, backbone="bert_micro", pretrained=False,
        num_exits=3, augment="none", finetune="frozen", method="inclusivefl",
    )  # fmt: skip
    with pytest.raises(ValueError, match="dataset = 'squad': 8 questions have no answer; allowed: .* squad_v2 may"):
        build_federation(e)
    f = build_federation(e.replace(dataset="squad_v2"))
    assert f.task.score(f.data.test_labels[:, :2], f.data.test_labels) == {"f1": 100.0, "exact_match": 100.0}


def test_answers_with_tokens_that_nobody_learns_are_said(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    texts = {"question": ["Ann has 3 apples ."] * 8, "equation": ["- number0 number1"] * 8}
    write(tmp_path / "svamp", train=texts, test=texts | {"equation": ["- number0 number1"] * 5 + ["( 8.0 )"] * 3})
    e = Experiment(dataset="svamp", partition="iid", num_clients=2, clients_per_round=2)
    with pytest.warns(UserWarning, match="svamp: 3 of 8 answers that are tested hold tokens of no training answer"):
        load_federated(e, size=32)


def test_federated_data_gives_clients_their_rows():
    e = Experiment(num_clients=20, clients_per_round=2, dirichlet_alpha=0.3)
    data = {s: load_federated(e.replace(test_split=s)) for s in ("central", "like_train", "contiguous", "labels")}
    assert data["central"].client_test(7).tolist() == list(range(1000))
    assert load_federated(e).test_split == "central"
    like = data["like_train"]
    labels, counts = like.test_labels.numpy(), like.label_counts()
    assert counts.sum(1).tolist() == [200] * 20 and counts.sum(0).tolist() == [400] * 10
    tests = np.stack([np.bincount(labels[like.client_test(i)], minlength=10) for i in range(20)])
    assert tests.sum(0).tolist() == [100] * 10 and (np.abs(tests - counts / 4) < 1).all()
    assert tests.tolist() != [
        np.bincount(labels[load_federated(e.replace(test_split="like_train", seed=2)).client_test(i)], minlength=10).tolist()
        for i in range(20)
    ]  # fmt: skip
    assert data["contiguous"].client_test(1).tolist() == list(range(50, 100))
    mine = data["labels"].client_test(3)
    assert set(labels[mine].tolist()) == set(np.flatnonzero(counts[3])) and len(mine) == 100 * (counts[3] > 0).sum()
    few = load_federated(e.replace(test_split="like_train", num_test=30))  # rows of the 30, not of the 1000
    assert sorted(np.concatenate([few.client_test(i) for i in range(20)]).tolist()) == list(range(30))


def test_validation_examples_are_held_out_of_every_class_for_every_seed():
    values = np.array([0] * 10 + [1] * 5 + [2])
    kept, held = hold_out(values, np.arange(16), 0.2)
    assert np.bincount(values[held]).tolist() == [2, 1] and sorted([*kept, *held]) == list(range(16))
    assert [x.tolist() for x in hold_out(values, np.arange(16), 0.0)] == [list(range(16)), []]

    e = Experiment(num_clients=5, clients_per_round=2, validation_fraction=0.25, num_train=2000)
    test, validation = load_federated(e), load_federated(e.replace(evaluate_on="validation"))
    other = load_federated(e.replace(evaluate_on="validation", seed=2))
    assert test.num_examples.tolist() == validation.num_examples.tolist() == [300] * 5
    assert len(test.test_labels) == 1000 and validation.test_labels.bincount().tolist() == [50] * 10
    assert test.holdings.indices.tolist() == validation.holdings.indices.tolist()
    assert validation.test_inputs.equal(other.test_inputs)
    trained = {x.numpy().tobytes() for x in validation.inputs[validation.holdings.indices]}
    tested = {x.numpy().tobytes() for x in validation.test_inputs}
    assert not trained & tested and len(tested) == 500


@pytest.mark.parametrize(
    "values, message",
    [
        ({"validation_fraction": 1.0}, "validation_fraction = 1.0 must be at least 0 and below 1"),
        ({"validation_fraction": -0.1}, "validation_fraction = -0.1 must be at least 0 and below 1"),
        ({"evaluate_on": "validation"}, "evaluate_on = 'validation' needs a validation_fraction above 0"),
    ],
)
def test_impossible_validation_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        load_federated(Experiment(**values))


def test_inputs_that_would_fill_half_of_a_gpu_stay_in_host_memory(monkeypatch):
    monkeypatch.setattr(federated, "free_memory", lambda device: 100)
    small, large = torch.zeros(20, dtype=torch.uint8), torch.zeros(31, dtype=torch.uint8)
    assert input_device([small, small], "cuda:0") == "cuda:0" and input_device([small, large], "cuda:0") == "cpu"
    assert input_device([large] * 9, "cpu") == "cpu"
