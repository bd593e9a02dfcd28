"""Does a wrapped net run as its owner made it? Its pieces, one after the other, are compared with the net itself.

timm's nets by name are not: the tests compare them.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fedlib.core.rng import global_states

from .wrapped import Wrapped, WrappedSpec, in_eval, line_of, train_

PLAIN = (bool, int, float, complex, str, bytes, type(None))
RUNS_AGAIN = "a checkpoint (torch.utils.checkpoint) would run again with another client's tensors; allowed: without it"


def check_plain(net: nn.Module) -> None:
    """Raise ``ValueError`` for what a copy of ``net`` that runs for each client would leave out, or never train."""
    known = {*net.parameters()}
    for path, m in net.named_modules():
        if m._backward_hooks or m._backward_pre_hooks:
            raise ValueError(f"wrap: module {path!r} has a backward hook, which would not run for each client")
        if isinstance(m, torch.jit.ScriptModule):
            raise ValueError(f"wrap: module {path!r} is compiled; wrap the module that it was made of")
        if getattr(m, "sparse", False) is True:
            raise ValueError(f"wrap: module {path!r} has sparse gradients; allowed: sparse=False")
        for name, p in m.named_parameters(path, recurse=False):
            if nn.parameter.is_lazy(p):
                raise ValueError(f"wrap: parameter {name!r} has no shape yet; call the net once before")
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                raise ValueError(f"wrap: parameter {name!r} has a hook, which would not run for each client")
        for name, value in vars(m).items():
            for x in tree_leaves(value):
                found = x.parameters() if isinstance(x, nn.Module) else [x] if isinstance(x, torch.Tensor) else ()
                if any(p.requires_grad and p.is_leaf and p not in known for p in found):
                    where = f"{path}.{name}".lstrip(".")
                    raise ValueError(f"wrap: {where!r} holds what is no parameter of the net, and would not be trained")


def check_faithful(net: nn.Module, spec: WrappedSpec) -> None:
    """Raise ``ValueError`` if the pieces of ``spec`` give, or learn, something else than ``net`` up to the last cut.

    On two images, in evaluation and in training, dropout off. Or if the net keeps numbers from one call to the next,
    or draws from another generator than PyTorch's: answers would follow from what else ran in the same process.
    It seeds the global generator (:func:`own_generators`).
    """
    x = torch.rand(2, *spec.input_shape, generator=torch.Generator().manual_seed(0))
    theirs, mine = copy.deepcopy(net), copy.deepcopy(net)
    known, ours, still = dict(theirs.named_parameters()), dict(mine.named_parameters()), in_eval(theirs)
    pieces = Wrapped(spec, mine)
    for training in (False, True):
        for m in theirs.modules():
            norm = isinstance(m, nn.modules.batchnorm._BatchNorm)  # by batches, wherever it does not stand still
            m.training = (training or norm) and m not in still and not isinstance(m, nn.modules.dropout._DropoutNd)
        where = f"wrap: in {'training' if training else 'evaluation'} "
        for name, p in known.items():
            p.requires_grad_(training and ours[name].requires_grad)
        wanted, before = _outputs_at_cuts(theirs, spec.cuts, x), _module_values(theirs)
        again, after = _outputs_at_cuts(theirs, spec.cuts, x), _module_values(theirs)
        with torch.set_grad_enabled(training), torch.autograd.graph.disable_saved_tensors_hooks(RUNS_AGAIN):
            got = _run(pieces, x, training)
        if not training and wanted[-1].requires_grad:
            raise ValueError("wrap: the net reads a tensor that learns, and is no parameter of it: none would train it")
        if what := next((k for k, v in after.items() if before.get(k) != v), ""):
            raise ValueError(f"{where}each call of the net moves {what}, on which later answers may depend")
        for cut, a, b, c in zip(spec.cuts, wanted, again, got, strict=True):
            if not _like(a, b):
                raise ValueError(f"{where}the net gives something else at cut {cut!r} when it is called again")
            if not _like(a, c):
                why = "a hook, code around forward_features, or a number that is drawn or counted around the cuts?"
                raise ValueError(f"{where}the net itself gives something else at cut {cut!r} than its pieces do: {why}")
    _check_rows(theirs.eval(), spec.cuts, x)
    wants, gets = _gradients(wanted[-1], known), _gradients(got[-1], ours)
    most = max((float(g.norm()) for g in wants.values() if g is not None), default=0.0)
    for name, a in wants.items():
        b = gets[name]
        if (a is None) != (b is None) or a is not None and float((a - b).norm()) > 0.05 * float(a.norm()) + 1e-3 * most:
            why = f"wrap: {name!r} of the net itself learns something else than in its pieces:"
            raise ValueError(f"{why} code around the cuts in torch.no_grad, or under another switch of PyTorch's?")


def _check_rows(net: nn.Module, cuts: Sequence[str], x: torch.Tensor) -> None:
    """Raise ``ValueError`` if what ``net`` answers to an image follows from another, or if a batch norm runs twice.

    Batch norms, whose statistics the kit takes, stand still meanwhile; ``net`` is a copy that is thrown away.
    The statistics of a norm that is called twice would be those of its last call, or of both.
    """
    calls = list[str]()
    for path, m in net.named_modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.running_mean, m.running_var = torch.zeros(m.num_features), torch.ones(m.num_features)
            m.register_forward_hook(lambda *_, path=path: calls.append(path))
    one, other = (_outputs_at_cuts(net, cuts, torch.stack([x[0], beside]))[-1] for beside in (x[1], 4 * x[1] - 1))
    if twice := next((path for path in calls if calls.count(path) > 2), ""):
        raise ValueError(f"wrap: {twice!r} is called twice; allowed: a batch norm of its own for each call")
    if not _like(one[:1], other[:1]):
        raise ValueError("wrap: an image's answer follows from the others of its batch; allowed: torch's batch norms")


@contextmanager
def own_generators() -> Iterator[None]:
    """Restore the global generators after the block, so that draws in it leave no trace."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _outputs_at_cuts(net: nn.Module, cuts: Sequence[str], x: torch.Tensor) -> list[torch.Tensor]:
    """Return the output of ``net`` itself at every cut; what follows the last one may fail."""
    seen: dict[str, torch.Tensor] = {}
    features = getattr(net, "forward_features", None)

    def look(cut: str, m: nn.Module, args: Any, out: torch.Tensor) -> None:
        seen[cut] = out.clone()  # the next module may write into it

    def looked(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = features(*args, **kwargs)
        look("", net, args, out)
        return out

    at = [cut for cut in cuts if cut or features is None]
    looks = [net.get_submodule(cut).register_forward_hook(partial(look, cut)) for cut in at]
    if features is not None:
        vars(net)["forward_features"] = looked
    why = f"it goes otherwise than {'forward_features' if features else 'forward'}"
    try:
        torch.random.manual_seed(0)
        net(x.clone())
    except Exception as error:  # whatever the net's code raises
        why = line_of(error)
    finally:
        vars(net).pop("forward_features", None)
        for hook in looks:
            hook.remove()
    if missing := [cut for cut in cuts if cut not in seen]:
        raise ValueError(f"wrap: the net itself does not come to cut {missing[0]!r}: {why}")
    return [seen[cut] for cut in cuts]


def _run(backbone: Wrapped, z: torch.Tensor, training: bool) -> list[torch.Tensor]:
    """Run the pieces one after the other and return their outputs."""
    out, z = [], z.unsqueeze(0)
    torch.random.manual_seed(0)
    for piece, trained in zip(backbone.blocks, backbone.trained, strict=True):
        train_(piece.modules(), False)
        train_(trained, training)
        z = piece(z.clone())
        out.append(z[0].clone())
    return out


def _like(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = a.detach().nan_to_num(), b.detach().nan_to_num()
    return a.shape == b.shape and bool((a - b).norm() <= 1e-3 * b.norm())


def _gradients(y: torch.Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor | None]:
    """Return the derivatives of a loss by parameter name; None where it does not depend on that parameter."""
    trained = {n: p for n, p in parameters.items() if p.requires_grad and y.requires_grad}
    given = torch.autograd.grad(y.square().mean(), [*trained.values()], allow_unused=True) if trained else ()
    return dict(zip(trained, given, strict=True))


def _module_values(net: nn.Module) -> dict[str, object]:
    """Return all plain values that the modules of ``net`` hold, by name, and states of the global generators."""
    out = {f"{whose} random numbers": x for whose, x in global_states().items() if whose != "PyTorch's"}
    for path, m in net.named_modules():
        for name, value in vars(m).items():
            kinds = [x if isinstance(x, PLAIN) else type(x) for x in tree_leaves(value)]
            out[repr(f"{path}.{name}".lstrip("."))] = name == "training" or kinds
    return out
