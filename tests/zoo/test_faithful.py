"""What a wrapped net does beside its pieces is refused, or runs as it does in the net itself."""

import random
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import fedlib
from fedlib import Execution, build_federation, run_rounds
from fedlib.models import registry
from tests.system.test_own_nets import CUTS, Caches, Net, experiment, forgotten  # noqa: F401

pytestmark = pytest.mark.usefixtures("forgotten")


class Deep(nn.Module):
    """A module with cuts inside."""

    def __init__(self):
        super().__init__()
        inner = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(inplace=True))
        self.enter, self.middle = nn.Conv2d(3, 8, 4, 4), nn.Sequential(inner, nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.middle(self.enter(x)).mean((2, 3)))


class Features(Net):
    """Its own forward does something beside ``forward_features``, or does not call it."""

    def __init__(self, before=None, goes=True):
        super().__init__(nn.Conv2d(8, 8, 1))
        self.before, self.goes = before or nn.Identity(), goes

    def forward_features(self, x):
        return self.middle(F.relu(self.enter(x)))

    def forward(self, x):
        if not self.goes:
            return super().forward(x)
        return self.head(self.forward_features(self.before(x)).mean((2, 3)))


class Triple(nn.Module):
    def forward(self, x):
        return 3 * x - 1


class Runs(nn.Module):
    """Its layer, called by somebody else."""

    def __init__(self, how, **settings):
        super().__init__()
        self.m, self.how, self.settings = nn.Conv2d(8, 8, 1), how, settings

    def forward(self, x):
        return self.how(self.m, x, **self.settings)


def clamped(m, x):
    with torch.no_grad():
        m.weight.clamp_(-0.1, 0.1)
    return m(x)


class Doubled(nn.Module):
    """One module, called twice."""

    def __init__(self, m):
        super().__init__()
        self.m = m

    def forward(self, x):
        return self.m(torch.relu(self.m(x)))


class Keeps(nn.Module):
    """Numbers from one call to the next, by the function ``then`` of the module and its input."""

    def __init__(self, then, **held):
        super().__init__()
        self.then, self.calls, self.held = then, 0, held

    def forward(self, x):
        return self.then(self, x)


class Counts(Net):
    """A counter around the cuts, which decides later."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x if self.calls < 1000 else 2 * x)


class Gains(Net):
    """A parameter of its own, parametrised."""

    def __init__(self):
        super().__init__(nn.Conv2d(8, 8, 1))
        self.gain = nn.Parameter(torch.linspace(1, 2, 8).view(8, 1, 1))
        parametrize.register_parametrization(self, "gain", Triple())

    def forward(self, x):
        return self.head(self.middle(F.relu(self.enter(x)) * self.gain).mean((2, 3)))


class Still(Net):
    """Its first layer is not trained, as its code says."""

    def forward(self, x):
        with torch.no_grad():
            x = self.enter(x)
        return self.head(self.middle(x).mean((2, 3)))


class Shifts(Net):
    """A tensor that its code makes."""

    def forward(self, x):
        return super().forward(x + torch.tensor(0.5))


class Half(Net):
    """A layer in another precision."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            x = self.enter(x)
        return self.head(self.middle(x.float()).mean((2, 3)))


def counted(m, x):
    m.calls += 1
    return x * m.calls


def idle(m, x):
    m.held["seen"].append(1)
    return x


def hooked(net, path, register, hook):
    getattr(net.get_submodule(path), register)(hook)
    return net


def weighed(net, register):
    getattr(net.enter.weight, register)(lambda p: None)
    return net


class Elsewhere(nn.Module):
    """A parameter in a plain container."""

    def __init__(self, kept):
        super().__init__()
        self.kept = kept

    def forward(self, x):
        return self.kept["a"][0](x) if isinstance(self.kept, dict) else x * self.kept[0]


def twice(m, args, out):
    return 2 * out


def shifted(m, args):
    return (args[0] * 3 - 1,)


OUTSIDE = nn.Conv2d(8, 8, 1)
DRAWN = np.random.default_rng(0)
REFUSED = {
    "pre-hook of the net": (lambda: hooked(Net(), "", "register_forward_pre_hook", shifted), "gives something else at cut 'enter' than its pieces do: a hook"),
    "backward hook of the net": (lambda: hooked(Net(), "", "register_full_backward_hook", lambda m, i, o: None), "module '' has a backward hook"),
    "backward hook of a layer": (lambda: hooked(Net(), "enter", "register_full_backward_pre_hook", lambda m, o: None), "module 'enter' has a backward hook"),
    "hook of a parameter": (lambda: weighed(Net(), "register_hook"), "parameter 'enter.weight' has a hook"),
    "hook of a gradient": (lambda: weighed(Net(), "register_post_accumulate_grad_hook"), "parameter 'enter.weight' has a hook"),
    "code around forward_features": (lambda: Features(Triple()), "gives something else at cut 'enter' than its pieces do: a hook, code around forward_f"),
    "a counter that scales": (lambda: Net(Keeps(counted)), "each call of the net moves 'middle.0.calls'"),
    "a list that grows": (lambda: Net(Keeps(idle, seen=[])), "each call of the net moves 'middle.0.held'"),
    "a counter around the cuts": (lambda: Counts(), "each call of the net moves 'calls'"),
    "Python's random numbers": (lambda: Net(Keeps(lambda m, x: x * random.random())), "each call of the net moves Python's random numbers"),
    "NumPy's random numbers": (lambda: Net(Keeps(lambda m, x: x * float(np.random.rand()))), "moves NumPy's random numbers"),
    "a generator of its own": (lambda: Net(Keeps(lambda m, x: x * float(DRAWN.random()))), "gives something else at cut 'middle' when it is called again"),
    "a tensor that is no buffer": (lambda: Net(Keeps(lambda m, x: x * m.held["a"].add_(1), a=torch.ones(1))), "does not run on shapes alone|when it is called again"),
    "a parameter in a list": (lambda: Net(Elsewhere([nn.Parameter(torch.ones(8, 1, 1))])), "'middle.0.kept' holds what is no parameter of the net"),
    "a layer in a dict": (lambda: Net(Elsewhere({"a": [nn.Conv2d(8, 8, 1)]})), "'middle.0.kept' holds what is no parameter of the net"),
    "a layer of nobody's": (lambda: Net(Keeps(lambda m, x: OUTSIDE(x))), "reads a tensor that learns, and is no parameter of it"),
    "compiled": (lambda: Net(torch.jit.script(nn.Conv2d(8, 8, 1))), "module 'middle.0' is compiled"),
    "no_grad around the cuts": (lambda: Still(), "'enter.weight' of the net itself learns something else than in its pieces: code .* torch.no_grad"),
    "autocast around the cuts": (lambda: Half(), "gives something else at cut 'enter' than its pieces|does not run on shapes"),
    "a lazy layer": (lambda: Net(nn.LazyConv2d(8, 1)), "parameter 'middle.0.weight' has no shape yet"),
    "double": (lambda: Net().double(), "does not run on shapes alone: .*double"),
    "bfloat16": (lambda: Net().bfloat16(), "does not run on shapes alone: .*BFloat16"),
    "a norm of its own": (lambda: Net(Keeps(lambda m, x: x / x.std(0, keepdim=True).add(1))), "an image's answer follows from the others of its batch"),
    "a mean over images": (lambda: Net(Keeps(lambda m, x: x - x.mean())), "an image's answer follows from the others of its batch"),
    "a batch norm of torch.nn.functional": (lambda: Net(Keeps(lambda m, x: F.batch_norm(x, None, None, training=True))), "follows from the others"),
    "a batch norm called twice": (lambda: Net(Doubled(nn.BatchNorm2d(8))), "'middle.0.m' is called twice; allowed: a batch norm of its own for each call"),
    "a checkpoint": (lambda: Net(Runs(checkpoint, use_reentrant=False)), "cannot be trained as it is: a checkpoint .* would run again"),
    "an old checkpoint": (lambda: Net(Runs(checkpoint, use_reentrant=True)), "cannot be trained as it is: When use_reentrant=True"),
    "weights changed in place": (lambda: Net(Runs(clamped)), "cannot be trained as it is: one of the variables"),
    "sparse gradients": (lambda: Net(nn.Sequential(nn.Embedding(2, 8, sparse=True))), "module 'middle.0.0' has sparse gradients; allowed: sparse=False"),
    "a net that fails": (lambda: Net(Keeps(lambda m, x: x if x.is_meta or x[9].sum() else x)), "does not come to cut 'middle': index 9"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_pieces_would_do_otherwise_is_refused_in_one_sentence(kind):
    make, words = REFUSED[kind]
    net, states = make(), (random.getstate(), str(np.random.get_state()), torch.random.get_rng_state())
    before = dict(registry.OWN)
    with pytest.raises(ValueError, match=words) as refused:
        fedlib.wrap(net, CUTS, (3, 32, 32), name="mine")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400 and registry.OWN == before
    assert states[:2] == (random.getstate(), str(np.random.get_state()))  # also where the net drew
    assert torch.equal(states[2], torch.random.get_rng_state())


def test_a_mean_over_images_is_found_whatever_the_weights(monkeypatch):
    """The images beside had one mean: of 40 draws of the weights 4 were taken."""
    monkeypatch.setattr(registry, "OWN", dict(registry.OWN))
    for seed in (1, 9, 27, 33):
        torch.manual_seed(seed)
        with pytest.raises(ValueError, match="follows from the others"):
            fedlib.wrap(Net(Keeps(lambda m, x: x - x.mean())), CUTS, (3, 32, 32), name="mine")


def test_a_forward_that_never_calls_its_features_has_no_output_of_them():
    with pytest.raises(ValueError, match="does not come to cut '': it goes otherwise than forward_features"):
        fedlib.wrap(Features(goes=False), ["enter", ""], (3, 32, 32))


TAKEN = {
    "a batch norm that keeps no statistics": (lambda: Net(nn.BatchNorm2d(8, track_running_stats=False)), CUTS),
    "hook of a layer": (lambda: hooked(Net(), "enter", "register_forward_hook", twice), CUTS),
    "pre-hook of a layer": (lambda: hooked(Net(), "enter", "register_forward_pre_hook", shifted), CUTS),
    "hook around a cut": (lambda: hooked(Deep(), "middle", "register_forward_hook", twice), ["enter", "middle.0.0", "middle"]),
    "pre-hook around a cut": (lambda: hooked(Deep(), "middle", "register_forward_pre_hook", shifted), ["enter", "middle.0.0", "middle"]),
    "hook at the head": (lambda: hooked(Net(), "", "register_forward_hook", twice), CUTS),
    "features": (lambda: Features(), ["enter", ""]),
    "a parametrised net": (lambda: Gains(), ["middle"]),
    "a tensor of its code": (lambda: Shifts(), CUTS),
    "kept in evaluation": (lambda: Net(Caches()), CUTS),
    "written into": (lambda: Deep(), ["enter", "middle.0.0", "middle.1"]),
    "a head of another size": (lambda: nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.BatchNorm2d(4), nn.Flatten(1), nn.Linear(3, 2)), ["0", "1"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_what_pieces_do_alike_is_taken(kind):
    make, cuts = TAKEN[kind]
    torch.manual_seed(0)
    net, caught = make().eval(), {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedlib.wrap(net, cuts, (3, 32, 32), name="mine")
    backbone, x = registry.build_backbone("mine", True), torch.randn(2, 3, 32, 32)
    for m in net.modules():
        m.training = isinstance(m, nn.BatchNorm2d)
    for cut in cuts:
        at = net.get_submodule(cut or "middle")
        at.register_forward_hook(lambda m, args, out, cut=cut: caught.update({cut: out.clone()}))
    try:
        net(x)
    except RuntimeError:
        assert kind == "a head of another size"
    z = x[None]
    for unit, cut in enumerate(cuts):
        _, z = backbone.advance(z, unit, 1)
        torch.testing.assert_close(z[0], caught[cut], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cohort", [1, 2])
def test_a_unit_that_writes_into_what_exits_read_changes_nothing(cohort):
    """A ReLU in place behind a cut, within a unit and at an end, and code that adds to the image itself."""
    ends = []
    for inplace in (False, True):
        torch.manual_seed(0)
        first = Keeps(lambda m, x, inplace=inplace: x.add_(1) if inplace else x + 1)
        layers = nn.Conv2d(3, 8, 4, 4), nn.ReLU(inplace), nn.Conv2d(8, 8, 3, 1, 1), nn.GroupNorm(2, 8), nn.ReLU(inplace)
        net = nn.Sequential(first, *layers, nn.Conv2d(8, 8, 1), nn.ReLU(inplace))
        clients = dict(method="depthfl", num_exits=3, num_train=48, num_clients=2, clients_per_round=2)
        f = build_federation(experiment(net, ["1", "4", "7"], **clients))
        assert [piece.writes for piece in f.model.backbone.blocks] == [inplace, inplace, inplace]
        ends.append(list(run_rounds(f, Execution(workers=1, cohort_size=cohort)))[-1])
    for name, p in ends[0].server.params.items():
        torch.testing.assert_close(ends[1].server.params[name], p, rtol=1e-5, atol=1e-6)
    assert ends[0].metrics["accuracy"] == ends[1].metrics["accuracy"]


def test_the_net_that_was_given_stays_as_it_was():
    net = Net(nn.BatchNorm2d(8), nn.Dropout(0.5))
    state, modes = {n: x.clone() for n, x in net.state_dict().items()}, [m.training for m in net.modules()]
    with pytest.warns(UserWarning, match="dropout"):
        fedlib.wrap(net, CUTS, (3, 32, 32), name="mine")
    assert modes == [m.training for m in net.modules()] and not net._forward_hooks and not net.enter._forward_hooks
    assert all(torch.equal(x, state[n]) for n, x in net.state_dict().items())
