"""The core without the lab: a method trains, and one sentence says where more is."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HIDDEN = """
import sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fedlib_lab":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hide())
import fedlib
"""


def alone(code):
    """The lines that ``code`` prints in a process that has no lab."""
    command = [sys.executable, "-c", HIDDEN + code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_method_of_each_paper_and_one_of_ones_own_train_by_rounds():
    said = alone("""
from dataclasses import dataclass
from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.methods import METHODS, register
from fedlib.methods.base import Method, cross_entropies

@register("halved")
@dataclass(frozen=True)
class Halved(Method):
    label = "Halved"

    def local_loss(self, batch):
        return cross_entropies(batch).sum(0) / 2

small = dict(num_train=60, num_test=20, num_clients=4, clients_per_round=4, rounds=1, pretrained=False)
for method in ("reefl", "scalefl_vit", "fedepth", "cafedistill", "raffm", "halved"):
    net = {"backbone": "resnet8", "num_exits": 3, "finetune": "full"} if method == "cafedistill" else {}
    net = {"finetune": "full"} if method in ("fedepth", "raffm", "scalefl_vit") else net
    e = Experiment(method=method, test_split="like_train", **small | net)
    *_, last = run_rounds(build_federation(e), Execution(workers=2))
    print(method, last.t, 0 <= last.metrics["accuracy"] <= 100)
print(len(METHODS))
""")
    assert [line.split()[1:] for line in said[:6]] == [["1", "True"]] * 6
    assert said[6] == "26"  # 25 of the papers, and one


def test_what_only_the_lab_has_is_said_in_a_sentence():
    said = alone("""
from fedlib import Execution, Experiment, build_federation
for fields in ({"method": "fjord"}, {"backbone": "vim_micro"}, {"dataset": "cifar10"}, {"finetune": "ia3"}):
    try:
        build_federation(Experiment(**{"pretrained": False} | fields))
    except ValueError as error:
        print(error)
try:
    Execution(executor="ray")
except ValueError as error:
    print(error)
try:
    fedlib.wrap
except ImportError as error:
    print(error)
""")
    assert len(said) == 6 and all(len(line) < 600 for line in said)
    for line, words in zip(said, ("method = 'fjord'", "backbone = 'vim_micro'", "dataset = 'cifar10'", "finetune = 'ia3'",
                                  "executor = 'ray'", "fedlib.wrap"), strict=True):  # fmt: skip
        assert words in line and ("fedlib-kit[lab]" in line or "allowed: auto, threads" in line), line
