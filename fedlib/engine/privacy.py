"""Client-level differential privacy: noise on the sum of a round's clipped updates, and what the rounds have cost.

DP-FedAvg (McMahan et al., ICLR 2018) with samples of fixed size: n of the N clients that may take part are drawn
without replacement, each sends an update of norm <= C, and the server adds N(0, (z C)^2) to every entry of the sum. It
divides by the number of holders to be expected, not by those who came, and noises entries nobody came with: who was
sampled must not show. What ``aggregate`` makes of these sums (FedAdam, momentum ...) is post-processing.

The guarantee: (epsilon, delta) for replacing all data of one client, towards those who see every global model. Public:
the budgets, which clients hold any examples, n, and all options. Not covered: what is stored to study a run (training
losses, numbers of examples, whether it diverged) and the client memories. The noise is a function of the
seed, so a run is a simulation: it protects from those who do not know the experiment.
Read next: ``methods/uploads.py`` (clipping).
"""

import functools
from collections import defaultdict
from dataclasses import replace

import torch

from ..core.clients import Client, clients_of
from ..core.rng import torch_generator
from ..core.slices import take_all
from ..methods.sums import MaskedMean, Update
from ..methods.values import Round, Server, unknown
from .federation import Federation


def privatise(f: Federation, server: Server, mean: MaskedMean, t: int) -> MaskedMean:
    """Return W theta + sum_i delta_i + N(0, (z C)^2) per entry, W the expected number of holders, for ``aggregate``.

    Without noise the sums as they are. ``ValueError`` if a method weighted its clients.
    """
    if not (method := f.method).noise_multiplier:
        return mean
    out, received = expected_sums(f, server)
    for name, total in mean.total.items():
        if not torch.equal(mean.weight[name], mean.count[name]):
            raise ValueError(f"{f.experiment.method}: noise_multiplier needs clients of weight 1 in the mean")
        out.total[name] += total - mean.weight[name] * received[name].double()
    assert method.update_norm is not None  # noise without it is refused
    sd = method.noise_multiplier * method.update_norm
    for name, total in out.total.items():
        stream = name.replace("backbone.", "vit.", 1)  # what the part was called when stored runs drew their noise
        stream = stream if stream[0].isdigit() else f"0/{stream}"
        generator = torch_generator(f.experiment.seed, f"dp noise/{stream}", t)
        total += sd * torch.randn(total.shape, generator=generator, dtype=torch.float64).to(total.device)
    return out


def expected_sums(f: Federation, server: Server) -> tuple[MaskedMean, dict[str, torch.Tensor]]:
    """Return the sums if every client sent n/N times what it received: public weights and counts, no update yet.

    And what the holders of each tensor that is sent received.
    """
    ids, infos, setting = f.candidates(), f.setting.infos, replace(f.setting, label_counts=unknown)  # they are private
    holders: dict[int, float] = defaultdict(float)  # expected clients per budget
    for c in clients_of(f.budgets, ids, f.data.num_examples):
        holders[c.budget] += f.sample_size / len(ids)
    mean, received = MaskedMean(infos), {}
    for budget, expected in sorted(holders.items()):
        client = Client(-1, budget, 0)
        member = f.method.members(client, server, Round(server.t, (client,), setting))[0]
        part, upload = member.part, member.upload or member.part
        params = {n: p[None] for n, p in take_all(server.params, infos, part).items()}
        received |= {upload.source(n): server.params[part.source(n)] for n in params}
        mean.add(Update((client,), (part,), params, dict.fromkeys(params, range(1)), (upload,)), [expected])
    mean.count.update({n: w.clone() for n, w in mean.weight.items()})
    return mean, received


def privacy_spent(f: Federation, t: int) -> dict[str, float]:
    """Return ``epsilon`` at ``delta`` of the global models up to round ``t``; nothing for a method without noise."""
    method, clients, keep = f.method, len(f.candidates()), f.method.remembers or f.experiment.batch_norm == "local"
    if not method.noise_multiplier:
        return {}
    delta = method.dp_delta if method.dp_delta is not None else 1 / (10 * clients)
    spent = epsilon(method.noise_multiplier, clients, f.sample_size, t, delta, hidden=not keep)
    return {"epsilon": round(spent, 4), "delta": delta}


@functools.lru_cache
def epsilon(noise_multiplier: float, clients: int, sampled: int, rounds: int, delta: float, hidden: bool) -> float:
    """Compute the epsilon of ``rounds`` noisy sums by the Renyi accountant of dp-accounting; the least of valid bounds.

    Replacing a client moves a sum by up to 2 C, so the ratio of noise to sensitivity is z/2. ``hidden`` samples amplify
    privacy (Wang, Balle, Kasiviswanathan 2019); where clients keep memory the proof of that fails, as a later update
    tells of an earlier participation, and only the bound that holds for known samples is left.
    """
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation, SampledWithoutReplacementDpEvent
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        needs = "noise_multiplier needs the package dp-accounting: pip install 'fedlib-kit[privacy]'"
        raise ImportError(needs) from error
    if not rounds:
        return 0.0
    noisy = GaussianDpEvent(noise_multiplier / 2)
    amplified = hidden and sampled < clients
    events = [noisy, SampledWithoutReplacementDpEvent(clients, sampled, noisy)] if amplified else [noisy]
    accountants = (RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_ONE) for _ in events)
    return float(min(a.compose(x, rounds).get_epsilon(delta) for a, x in zip(accountants, events, strict=True)))
