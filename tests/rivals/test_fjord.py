"""FjORD: widths, shells and its distillation by hand, a round against a plain loop over narrow nets, what it costs."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import numpy_generator, torch_generator
from fedlib.core.slices import Axis
from fedlib.engine.schedules import round_rate
from fedlib.methods import build_method
from fedlib.methods.losses import Batch
from fedlib.methods.sums import MaskedMean, Update
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from tests.helpers.plain_convnets import PlainResNet, plain_name

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1), widths=(4, 6), size=32)
RATES = [0.25, 0.5, 1.0]


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="fjord", options={"rates": RATES}, backbone="toy", pretrained=False, finetune="full", num_exits=1,
        augment="none", momentum=0.0, weight_decay=1e-3, clip_value=None, lr=0.05, num_train=90, num_test=60,
        num_clients=3, clients_per_round=3, rounds=2, batch_size=8, partition="class_dirichlet", dirichlet_alpha=1.0,
        test_split="like_train",
    )  # fmt: skip


def kept(rate):
    a, b = (list(range(math.ceil(rate * n))) for n in (4, 6))
    rgb, classes, three, one = list(range(3)), list(range(10)), list(range(3)), [0]
    return {
        "stem.conv.weight": (a, rgb, three, three), "stem.bn.weight": (a,), "stem.bn.bias": (a,),
        "blocks.0.conv1.weight": (a, a, three, three), "blocks.0.bn1.weight": (a,), "blocks.0.bn1.bias": (a,),
        "blocks.0.conv2.weight": (a, a, three, three), "blocks.0.bn2.weight": (a,), "blocks.0.bn2.bias": (a,),
        "blocks.1.conv1.weight": (b, a, three, three), "blocks.1.bn1.weight": (b,), "blocks.1.bn1.bias": (b,),
        "blocks.1.conv2.weight": (b, b, three, three), "blocks.1.bn2.weight": (b,), "blocks.1.bn2.bias": (b,),
        "blocks.1.projection.weight": (b, a, one, one),
        "blocks.1.projection_bn.weight": (b,), "blocks.1.projection_bn.bias": (b,),
        "linear.weight": (classes, b), "linear.bias": (classes,),
    }  # fmt: skip


def narrow_gradient(state, rate, x, y, loss):
    """Gradient of ``loss(logits, y)`` of the net of this rate, cut out of ``state``, as a whole net's."""
    index = kept(rate)
    net = PlainResNet(replace(TOY, widths=(math.ceil(rate * 4), math.ceil(rate * 6))), 10, tracks=False)
    net.load_state_dict({n: torch.tensor(p[np.ix_(*index[n])]).float() for n, p in state.items()})
    logits = net(x)
    loss(logits, y).backward()
    out = {n: np.zeros(p.shape) for n, p in state.items()}
    for n, p in net.named_parameters():
        out[n][np.ix_(*index[n])] = p.grad.double().numpy()
    return out, logits.detach()


@pytest.mark.parametrize("options", [{}, {"kd_weight": 0.6, "temperature": 2.0}, {"distill": False}])
def test_rounds_equal_a_plain_loop_over_narrow_nets(convnet, options):
    f = build_federation(convnet.replace(options={"rates": RATES, **options}))
    e, state = f.experiment, {plain_name(n): p.double().numpy() for n, p in f.server.params.items()}
    a, tau = options.get("kd_weight", 1.0), options.get("temperature", 1.0)
    for t in (1, 2):
        total, weight = ({n: np.zeros(p.shape) for n, p in state.items()} for _ in range(2))
        for client in f.sample_clients(t):
            index, rng = kept(RATES[client.budget]), numpy_generator(e.seed, "width", t, client.budget)
            inside = {n: np.zeros(p.shape) for n, p in state.items()}
            for n, where in index.items():
                inside[n][np.ix_(*where)] = 1
            own, mine = {n: p.copy() for n, p in state.items()}, f.data.client(client.id)
            order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
            for at in range(0, len(mine), e.batch_size):
                rows = torch.from_numpy(mine[order[at : at + e.batch_size]])
                x, y = f.data.view(f.data.inputs, TOY.input_shape, rows), f.data.labels[rows]
                rate = RATES[rng.integers(client.budget + 1)]
                if options.get("distill", True):
                    g, teacher = narrow_gradient(own, RATES[client.budget], x, y, F.cross_entropy)

                    def taught(logits, y, teacher=teacher):
                        p, q = (teacher / tau).softmax(-1), (logits / tau).log_softmax(-1)
                        return (1 - a) * F.cross_entropy(logits, y) + a * tau**2 * F.kl_div(q, p, reduction="batchmean")

                    more, _ = narrow_gradient(own, rate, x, y, taught)
                    g = {n: g[n] + more[n] for n in g}
                else:
                    g, _ = narrow_gradient(own, rate, x, y, F.cross_entropy)
                for n, p in own.items():  # decay moves all that the client holds
                    own[n] = p - round_rate(e, t) * (g[n] + e.weight_decay * p) * inside[n]
            for n, p in own.items():
                total[n] += client.num_examples * p * inside[n]
                weight[n] += client.num_examples * inside[n]
        state = {n: np.where(weight[n] > 0, total[n] / np.maximum(weight[n], 1), p) for n, p in state.items()}
    for size in (1, 3):
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size))
        for name, p in last.server.params.items():
            torch.testing.assert_close(p.double().numpy(), state[plain_name(name)], rtol=1e-4, atol=2e-5)


def test_widths_and_shells_by_hand():
    """64 channels keep 13, 26, 39, 52, 64. Of ten, (30, 1) holds two, (10, 4) six, (10, 7) all: 2.8, 5.5 and 7."""
    method = build_method("fjord", {})
    assert [method.kept(p, 64) for p in method.rates] == [13, 26, 39, 52, 64]
    assert [method.kept(p, 10) for p in (0.2, 0.2 * 1 + 0.4, 1.0)] == [2, 6, 10]  # 0.6000000000000001 keeps six
    from fedlib.core.slices import ParamInfo, Slice

    infos, axis = {"w": ParamInfo(("a",), "backbone", 0, (10,))}, Axis("a", (10,))
    mean = MaskedMean(infos)
    for i, (p, n, value) in enumerate(((0.2, 30, 1.0), (0.6, 10, 4.0), (1.0, 10, 7.0))):
        part = Slice.prefix(1, (0,), index={"a": axis.leading(lambda size, p=p: method.kept(p, size))})
        sent = {"w": torch.full((1, len(part.index["a"])), value)}
        mean.add(Update((Client(i, i, n),), (part,), sent, {"w": [0]}), [float(n)])
    out = mean.result({"w": torch.zeros(10)})["w"]
    torch.testing.assert_close(out, torch.tensor([2.8] * 2 + [5.5] * 4 + [7.0] * 4))


def test_the_distillation_by_hand():
    """Teacher (0, ln 3), student (0, 0), label 1: -ln 0.75 and KL = 0.25 ln 0.5 + 0.75 ln 1.5; only the student learns."""
    whole = torch.tensor([[[[0.0, math.log(3)]]]], requires_grad=True)
    out = torch.zeros(1, 1, 1, 2, requires_grad=True)
    batch = Batch(out, torch.tensor([[1]]), torch.ones(1, 1), torch.ones(1, 1), whole=lambda: whole)
    loss = build_method("fjord", {}).taught(batch)
    assert loss.item() == pytest.approx(-math.log(0.75) + 0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-6)
    student, teacher = torch.autograd.grad(loss.sum(), (out, whole))
    torch.testing.assert_close(student.flatten(), torch.tensor([0.25, -0.25]))
    torch.testing.assert_close(teacher.flatten(), torch.tensor([0.25, -0.25]))  # of its own cross-entropy alone


def test_one_rate_without_distillation_is_fedavg(convnet):
    e = convnet.replace(options={"rates": [1.0], "distill": False})
    *_, ours = run_rounds(build_federation(e), ONE)
    *_, fedavg = run_rounds(build_federation(e.replace(method="fedavg", options={})), ONE)
    for name, p in fedavg.server.params.items():
        torch.testing.assert_close(ours.server.params[name], p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("finetune", ["frozen", "lora"])
def test_a_transformers_frozen_part_is_cut_too(tiny, finetune):
    """The narrow step of a wide client is a step of the narrow client: same tensors, same batches, another rate."""
    e = tiny.replace(
        method="fjord", finetune=finetune, finetune_options={}, rounds=1, num_clients=4, clients_per_round=4
    )
    options = {"rates": [0.5, 1.0], "distill": False}
    ends = [list(run_rounds(build_federation(e.replace(options=options)), Execution(workers=1, cohort_size=k)))[-1]
            for k in (1, 4)]  # fmt: skip
    for name, p in ends[0].server.params.items():
        torch.testing.assert_close(ends[1].server.params[name], p, rtol=0, atol=1e-5)
    assert not ends[0].diverged


def test_a_run_goes_on_where_it_stopped(convnet):
    f = build_federation(convnet.replace(rounds=3))
    first, _, whole = run_rounds(f, ONE)
    *_, resumed = run_rounds(f, ONE, first.server)
    assert all(torch.equal(p, resumed.server.params[n]) for n, p in whole.server.params.items())


def test_what_cannot_be_is_refused(convnet):
    with pytest.raises(
        ValueError, match="fjord: batch_norm = 'tracked': widths would share statistics; allowed: batch"
    ):
        build_federation(convnet.replace(batch_norm="tracked"))
    with pytest.raises(ValueError, match=r"fjord: rates = \[0.5, 0.25\] must increase within"):
        build_method("fjord", {"rates": [0.5, 0.25]})
    with pytest.raises(ValueError, match="kd_weight"):
        build_method("fjord", {"distill": False, "kd_weight": 0.5})
