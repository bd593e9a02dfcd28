"""FIARSE (Wu et al., NeurIPS 2024): a client trains the largest weights, entry by entry, of a share that it can have.

Client (share s): theta is the s N-th largest |x| of all N entries of layers' weights and biases (norms, tokens and what
is frozen are whole and not counted); trains x M with M = [|x| >= theta], taken anew in every step, and the gradient
(threshold-controlled) dF/d(x M) * M * (1 + 2 theta |x| / (|x| + theta)^2). Server: every entry is the plain mean over
those whose M held it on arrival. Budgets are the shares. A client answers with x M of its own theta.
**Nothing is computed faster**: the masked net has the whole net's shapes, and costs say so; what it sends is smaller.
Read next: ``heterofl.py``.

Deviations: in the release the factor never acts, as its mask has no gradient (``gradient="masked"``), and the mean is
over those whose entry changed at all (``mean_over="moved"``). Its thresholds by layer and its server's rate (1) are
not options. LoRA's B starts at zero: until clients of share 1 have moved it, others do not train it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from fedlib.core.annotations import Share
from fedlib.methods.base import Arrived, Client, Cohort, Experiment, Member, Round, Sizes, Slice
from fedlib.methods.sums import MaskedMean, Tensors, Update
from fedlib.methods.values import Server, Serving, Setting
from fedlib.methods.widths import Shares

HELD, LARGEST = "held/", "largest/"  # before a tensor's name: where it was held; x M of the largest share


@dataclass(frozen=True)
class FIARSE(Shares):
    """The paper's four shares: those of the weights in widths 1/8, 1/4, 1/2 and 1."""

    label, color, marker = "FIARSE", "#2c2a05", "d"

    version: ClassVar[int] = 2  # entries that no client trains answered centrally
    share_option: ClassVar[str] = "shares"
    one_slice: ClassVar[bool] = False

    shares: tuple[Share, ...] = (1 / 64, 1 / 16, 1 / 4, 1.0)  # of the entries
    gradient: Literal["biased", "masked"] = "biased"
    mean_over: Literal["holders", "moved"] = "holders"
    weighting: Literal["examples", "clients"] = "clients"

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        return self.known(Server(0, params, {}), params, setting)

    def known(self, server: Server, params: Tensors, setting: Setting) -> Server:
        """Give ``server`` its ``params``, thresholds and, where no client holds all, what the largest share does."""
        theta, top = thresholds(params, self.shares, setting), setting.at_hand(len(self.shares) - 1)
        named = [n for n in params if is_masked(n, setting)] if self.shares[top] < 1 else []
        answers = {LARGEST + n: masked(params[n], theta[top]) for n in named}
        return replace(server, params={**params, **answers}, memory={"theta": theta})

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full()

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        theta = server.memory["theta"][client.budget]
        return [Member(client, r.setting.full(), payload={"threshold": {"theta": theta}})]

    def local_update(self, cohort: Cohort) -> None:
        theta, setting = cohort.payload("threshold")["theta"], cohort.setting  # (M,)

        def used(name: str, p: torch.Tensor) -> torch.Tensor:
            if name not in cohort.params or not is_masked(name, setting):
                return p
            return masked(p, of_rows(theta, cohort.rows[name], p), self.gradient == "biased")

        cohort.train(self.local_loss, view=lambda step: used)

    def upload(self, cohort: Cohort) -> Update:
        """Send every masked tensor twice: with zeros where it is not held, and where it is."""
        update, theta, params = super().upload(cohort), cohort.payload("threshold")["theta"], {}
        for name, p in update.params.items():
            params[name] = p
            if is_masked(name, cohort.setting):
                start, least = cohort.start[name], of_rows(theta, cohort.rows[name], p)
                kept = start.abs() >= least if self.mean_over == "holders" else p != start
                params[name], params[HELD + name] = p * kept, kept.to(p.dtype)
        return replace(update, params=params, rows={n: update.rows[n.removeprefix(HELD)] for n in params})

    def summarise(self, update: Update, setting: Setting) -> MaskedMean:
        mean = MaskedMean({**setting.infos, **{HELD + n: i for n, i in setting.infos.items()}})
        mean.add(update, update.weights(self.weighting))
        return mean

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        total, new = arrived.mean.total, {n: p for n, p in server.params.items() if n in r.setting.infos}
        for name in new.keys() & total.keys():  # statistics that are a client's own do not arrive
            old, held = new[name], total.get(HELD + name, arrived.mean.weight[name])
            new[name] = torch.where(held > 0, (total[name] / held).to(old.dtype), old)
        return self.known(replace(server, t=r.t), new, r.setting)

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Return the whole net, or where no client holds all of it x M of the largest share."""
        largest = {n: LARGEST + n for n in r.setting.infos if LARGEST + n in server.params}
        return replace(r.setting.full(), aliases=largest)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        theta = server.memory["theta"][client.budget]
        own = {n: masked(p, theta) for n, p in server.params.items() if is_masked(n, r.setting)}
        return Serving((Member(client, r.setting.full(), payload={"start": own}),))

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """What is whole, and the share of the rest; down also a bit for each entry, where it is not all of them."""
        share, inner = self.shares[client.budget], sum(n for name, n in shared.items() if is_masked(name, setting))
        whole, held = sum(shared.values()) - inner, kept_of(share, inner)
        return [whole, held, -(-inner // 32) if share < 1 else 0], [whole, held]


def is_masked(name: str, setting: Setting) -> bool:
    """Return whether ``name`` is a weight or a bias of a layer whose weight is a matrix or a kernel."""
    weight = setting.infos.get(f"{name.rpartition('.')[0]}.weight")
    return weight is not None and len(weight.shape) > 1


def kept_of(share: float, entries: int) -> int:
    return max(1, int(share * entries + 1e-9))


def thresholds(params: Tensors, shares: Sequence[float], setting: Setting) -> torch.Tensor:
    """Return theta of every share, (shares,): the share's last of all masked entries, by size."""
    sizes = torch.cat([p.abs().flatten() for n, p in params.items() if is_masked(n, setting)]).sort().values
    return torch.stack([sizes[len(sizes) - kept_of(s, len(sizes))] for s in shares])


def masked(x: torch.Tensor, theta: torch.Tensor, biased: bool = False) -> torch.Tensor:
    """Return x M; ``biased``: its gradient to x is M (1 + 2 theta |x| / (|x| + theta)^2), else M."""
    size = x.detach().abs()
    kept = (size >= theta).to(x.dtype)
    if not biased:
        return x * kept
    factor = 1 + 2 * theta * size / (size + theta).square().clamp(min=torch.finfo(x.dtype).tiny)
    return x.detach() * kept + (x - x.detach()) * (kept * factor)


def of_rows(theta: torch.Tensor, rows: Sequence[int], p: torch.Tensor) -> torch.Tensor:
    """Select ``theta`` (M,) of the members ``rows``, shaped as ``p`` (rows, ...) broadcasts with it."""
    own = theta if len(rows) == len(theta) else torch.stack([theta[i] for i in rows])  # no index is sent to a device
    return own.view(-1, *(1,) * (p.dim() - 1))
