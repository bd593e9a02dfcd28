"""A cohort: models of a round's clients that train together as one batched program.

Trainable tensors are stacked along a new first dimension, one row for each member (a client's model), frozen ones are
kept once. Members are sorted deepest first, so unit l runs only for those still alive, and a parameter is stacked only
for the members that hold it. The members' losses are summed: no trainable parameter is shared, so each gets exactly
its own gradient. A cohort of one is ordinary sequential training on the same path.
Read next: ``stacks.py`` (what is stacked), ``stages.py``, ``batches.py``, ``optimisers.py``.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch

from ..core.devices import to_device
from ..core.profiling import phase
from ..core.slices import NOTHING, Slice, take, within
from ..core.validation import check_type
from ..layers.norms import statistics
from ..layers.overrides import override
from ..methods.losses import Batch
from ..methods.sums import Update, finite_sums
from ..methods.values import Member, Round, Server, Stage
from ..models.exit_model import ExitModel
from ..models.route import Route
from .batches import Batches, draw_batches, in_order
from .federation import Federation
from .forward import Forward, by_example
from .optimisers import build_optimiser
from .schedules import step_rates
from .stacks import Stack
from .stages import PrecomputedUnits, check_stage, is_trained, route_of, units_ahead
from .teacher import Teacher

Tensors = dict[str, torch.Tensor]
Loss = Callable[[Batch], torch.Tensor]
View = Callable[[str, torch.Tensor], torch.Tensor]


class Cohort:
    """Members of a round that share one program and equal shapes, from download to upload."""

    def __init__(
        self, federation: Federation, model: ExitModel, server: Server, r: Round, members: Sequence[Member],
        memories: Mapping[int, Tensors],
    ):  # fmt: skip
        self.federation, self.model, self.server, self.round = federation, model, server, r
        self.experiment, self.data, self.setting, self.t = federation.experiment, federation.data, r.setting, r.t
        training = sorted(
            (m for m in members if m.trains), key=lambda m: (-m.part.depth, -m.client.budget, m.client.id)
        )
        self.members = tuple(training)
        self.clients = tuple(m.client for m in training)  # of each member; peers share one
        self.slices = tuple(m.part for m in training)
        self.memories = memories
        self.new_memories: dict[int, Tensors] = {}
        self.extras: dict[int, Tensors] = {}
        self._losses: torch.Tensor | None = None  # (M,), the last local training's means
        self.steps = torch.zeros(len(training), dtype=torch.long)  # (M,), of the last local training
        self.rate = federation.rate(r.t, self.clients)  # of this round, before a ``local_schedule``
        self.stack = Stack(federation, self.members, memories)
        self.rows: Mapping[str, Sequence[int]] = self.stack.rows
        self.start = self.stack.tensors(server.params)  # what the clients start from, stacked
        self.params = {n: p.clone() for n, p in self.start.items()}  # what they train
        self.forward = Forward(
            model, self.slices, self.stack.frozen(server.changed), self.params, data=self.data,
            cache=None if self.stack.is_cut else federation.train_cache,
            bfloat16=self.experiment.precision == "bfloat16",
        )  # fmt: skip
        held = [[j in s.exits for s in self.slices] for j in range(len(model.exit_units))]
        self.held = torch.tensor(held, dtype=torch.float32, device=self.data.device)
        still = {name: [m for m in members if m.name == name] for name in (m.name for m in members if not m.trains)}
        self.teachers = {
            name: Teacher(federation, self.forward, self.clients, same, server.params, memories)
            for name, same in still.items()
        }
        self._ahead: PrecomputedUnits | None = None  # what the last stage kept
        # a second local training goes on drawing where the first stopped
        self._draws = cache(partial(self.generator, "local"))
        self._generators = [self.generator(f"dropout of {m.name}", m.client.id) for m in self.members]

    def generator(self, purpose: str, client: int) -> torch.Generator:
        """Return the generator of a client in this round, of those who train."""
        return self.federation.generator(purpose, self.t, client)

    def label_counts(self) -> torch.Tensor:
        """Count the training examples by label of each member's client, (M, classes)."""
        return self.stack.label_counts

    # --- what members received, remember and send ----------------------------------------------------------------

    @property
    def received(self) -> Tensors:
        """The server's parameters, stacked like ``params``: what members that keep nothing start from."""
        return self.stack.tensors(self.server.params, own=False)

    def recall(self, key: str) -> Tensors:
        """Return each client's stored tensors ``key/<parameter>``, stacked like ``params``.

        Zeros where there are none.
        """
        return self.stack.recall(key, self.params)

    def remember(self, key: str, tensors: Tensors, rows: Mapping[str, Sequence[int]] | None = None) -> None:
        """Store ``tensors`` (stacked like ``params``) with each client, across rounds. Its other keys stay.

        ``rows``: the members whose tensors these are, where they are not those of ``params``.
        """
        for name, i, tensor in self._by_member(tensors, rows or self.rows):
            self._remember(self.clients[i].id, f"{key}/{name}", tensor)

    def _remember(self, client: int, name: str, tensor: torch.Tensor) -> None:
        self.new_memories.setdefault(client, dict(self.memories.get(client, {})))[name] = tensor.detach().clone()

    def keep(self) -> None:
        """Store personal parameters with their clients, under the member's name."""
        for i, name, row in self.stack.personal():
            self._remember(self.clients[i].id, f"{self.members[i].name}/{name}", self.params[name][row])

    def payload(self, key: str) -> Tensors:
        """Return what members brought under ``key``, stacked: like ``params`` where it is named so, else (M, ...)."""
        return self.stack.payload(key, self.params)

    def rows_named(self, member: str) -> Callable[[str], torch.Tensor]:
        """Return a function from a parameter to a mask: 1 on the rows of the members called ``member``, else 0."""

        @cache
        def of(rows: Sequence[int]) -> torch.Tensor:
            return torch.tensor([float(self.members[i].name == member) for i in rows], device=self.data.device)

        def mask(name: str) -> torch.Tensor:
            p = self.params[name]
            return of(self.rows[name]).to(p.dtype).view(-1, *(1,) * (p.dim() - 1))

        return mask

    def send(self, key: str, tensors: Tensors) -> None:
        """Send ``key/<name>`` beside the model: stacked like ``params`` where named so, else (M, ...)."""
        for name, i, tensor in self._by_member(tensors, self.rows):
            self.extras.setdefault(self.clients[i].id, {})[f"{key}/{name}"] = tensor.detach().clone()

    def _by_member(self, tensors: Tensors, rows: Mapping[str, Sequence[int]]):
        """Yield name, member and tensor of what is stacked."""
        for name, stacked in check_type(tensors, Mapping, "tensors to remember or send").items():
            if len(stacked) != len(held := rows.get(name, range(len(self.members)))):
                whose = f"{len(held)} members hold it: row j is that of member cohort.rows[name][j]"
                raise ValueError(f"{name!r} has {len(stacked)} rows, and {whose}")
            yield from ((name, i, stacked[row]) for row, i in enumerate(held))

    def update(self) -> Update:
        """Return the upload: every member's part, or what its ``upload`` says, without what is personal."""
        if all(m.upload is None and m.keeps == "personal" for m in self.members) and not self.stack.personal_names:
            return Update(self.clients, self.slices, self.params, self.rows)
        uploads = tuple(NOTHING if m.upload is None and m.keeps == "all" else m.upload or m.part for m in self.members)
        params, rows, infos = {}, {}, self.setting.infos
        for name, held in self.rows.items():
            if name in self.stack.personal_names:
                continue
            if sent := [row for row, i in enumerate(held) if uploads[i].holds(infos[name])]:
                whole = len(sent) == len(held)
                params[name] = self.params[name] if whole else self.params[name][sent]
                rows[name] = held if whole else [held[row] for row in sent]
        return Update(self.clients, self.slices, params, rows, uploads)

    @property
    def trained(self) -> Tensors:
        """``params`` without batch norm's statistics, which no optimiser moves."""
        return {n: p for n, p in self.params.items() if self.setting.infos[n].kind != "statistic"}

    # --- training ------------------------------------------------------------------------------------------------

    def train(
        self, loss: Loss, stage: Stage = Stage(), gradient: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
        view: Callable[[int], View] | None = None,
    ) -> None:  # fmt: skip
        """Run one optimiser from ``params``, in place. A second run of a round goes on drawing where the first stopped.

        ``gradient(name, p)`` is added before clipping, where the loss reaches p. Members that ran out of batches stand
        still. A loss is (M,), one number for each member. A stage none of whose parameters is trainable is over at
        once. ``view(step)`` makes the tensors that run in a step, by name, of those that are held, with gradients to
        them; ``Batch.whole`` gives the outputs of these.
        """
        e, device = self.experiment, self.data.device
        check_stage(stage, self.setting.spec.depth, self.setting.exit_units)
        names = [n for n in self.params if is_trained(stage, self.setting.infos[n], len(self.held))]
        if not names:  # exits in turn with a backbone that is frozen
            return
        leaves = [self.params[n].requires_grad_(True) for n in names]
        with phase("data"):
            batches = draw_batches(e, self.data, self.clients, self._draws, stage.epochs)
        rate = stage.lr if stage.lr is not None else self.rate
        forward, route = self.forward, route_of(stage, self.forward.route, len(self.held))
        forward.tensors = (forward.tensors[0], self.params)  # a method may have others by now
        if stage.without or view is not None:  # the cache ran what this stage does not
            forward.cache = None
        with phase("forward"):
            forward.place_(training=True).fill(batches.examples)
            forward.place_(training=True, generators=self._generators)
        optimiser = build_optimiser(e, leaves, [self.rows[n] for n in names], batches.active)
        ahead, before = None, self._ahead if stage.units is not None else None
        units = units_ahead(self.federation, forward, self.clients, stage, names) if view is None else 0
        if units:
            with phase("forward"):
                ahead = PrecomputedUnits(self.federation, forward, self.clients, stage, units, batches, before)
        self._ahead, before = ahead if stage.units is not None else None, None
        total, scratch = torch.zeros(len(self.members), device=device), {}
        rates = step_rates(e, rate, batches.steps, device)

        def take_step(step: int, batches: Batches = batches) -> None:
            batch = self._run(batches, step, route, ahead, scratch, view)
            with phase("forward"):
                losses = loss(batch)
            if (shape := tuple(getattr(losses, "shape", ()))) != total.shape:  # of a mean each member's part is less
                raise ValueError(f"{e.method}: a loss of shape {shape}; allowed: ({len(total)},), a number a member")
            if not losses.requires_grad:
                raise ValueError(f"{e.method}: a loss without a gradient; allowed: one that follows from batch.outputs")
            with phase("backward"):
                grads = list(torch.autograd.grad(losses.sum(), leaves, allow_unused=True))
            with phase("step"), torch.no_grad():
                total.add_(losses.detach())
                if gradient is not None:  # not in place: in a batch of one, gradients share memory
                    both = zip(names, grads, strict=True)
                    grads = [g if g is None else g + self._own(gradient, n) for n, g in both]
                optimiser.step_(grads, batches.at(step, rates), batches.active[step])

        repeat = override("repeat") if view is None else None
        if repeat is None or not repeat(take_step, batches, optimiser, forward, (self.params, scratch)):
            for step in range(len(batches.width)):
                take_step(step)
        forward.place_()
        for p in leaves:
            p.requires_grad_(False)
        self.steps = torch.as_tensor(batches.steps, device=device)
        self._losses = total / self.steps.clip(1)

    def _own(self, gradient: Callable[[str, torch.Tensor], torch.Tensor], name: str) -> torch.Tensor:
        """Return ``gradient`` of a parameter; ``ValueError`` for a shape that would reach other members' entries."""
        given, shape = gradient(name, p := self.params[name]), tuple(p.shape)
        got = getattr(given, "shape", () if isinstance(given, (int, float)) else None)
        if got not in ((), shape, shape[1:]):
            why = f"{self.experiment.method}: gradient({name!r}, p) of shape {got and tuple(got)}"
            raise ValueError(f"{why}; allowed: {shape}, as p, or {shape[1:]}, for all members")
        return given

    def losses(self, update: Update) -> tuple[dict[int, float], bool]:
        """Return each client's mean loss, of its first member, and whether all of ``update`` is finite.

        One transfer.
        """
        told = [] if self._losses is None else [self._losses]
        if update.params:
            told.append((~finite_sums(update.params.values())).to(torch.float32).view(1))
        with phase("backward"):  # on a GPU what is still queued
            numbers = torch.cat(told).cpu().tolist() if told else []
        means = zip(self.clients, numbers, strict=False) if self._losses is not None else ()
        return {c.id: x for c, x in reversed(list(means))}, not update.params or numbers[-1] == 0

    def narrow(self, part: Slice) -> View:
        """Return the view of a ``part`` of what the members hold, who keep the same entries.

        Frozen tensors are cut too.
        """
        inner = within(part, self.slices[0])

        def cut(name: str, p: torch.Tensor) -> torch.Tensor:
            info = self.setting.infos[name]
            stacked = (None,) * (p.dim() - len(info.shape))
            return take(p, replace(info, axes=(*stacked, *info.axes), shape=tuple(p.shape)), inner)

        return cut

    def answers(self, exit: int = -1) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (features, labels, weights) at ``exit`` over every client's own examples in order, without gradients.

        Features (M, B, d) are flattened; weights (M, B) are 1 on examples and 0 on padding.
        """
        unit, forward, e = self.model.exit_units[exit], self.forward.place_(), self.experiment
        policy = e.batch_norm if e.batch_norm in ("tracked", "local") else "batch"  # as ``Forward.answer`` has it
        for rows, weights in in_order(self.data, self.clients, e.batch_size, by_example(self.model, policy, False)):
            forward.fill(rows.numpy())
            seen: dict[int, torch.Tensor] = {}
            watch = lambda at, z, feature, *_, seen=seen: seen.update({at: feature})  # noqa: E731
            forward.answer(forward.inputs(rows), weights, watch=watch)
            device = self.data.device
            yield seen[unit].flatten(2).float(), self.data.labels[rows.to(device)], weights.to(device)

    def _run(
        self, batches: Batches, step: int, route: Route, ahead: PrecomputedUnits | None, scratch: dict,
        view: Callable[[int], View] | None,
    ) -> Batch:  # fmt: skip
        """Run the members, or this step's view of them, on its inputs."""
        features = {}
        rows, padding = batches.of(step, batches.rows), batches.padding(step)
        with phase("data"):
            views = None if batches.views is None else batches.of(step, batches.views)
            x = ahead(batches.of(step, ahead.places)) if ahead is not None else self.forward.inputs(rows, views)
        exit_of = {unit: j for j, unit in enumerate(self.model.exit_units)}

        def watch(unit: int, z: torch.Tensor, feature: torch.Tensor, *_: object) -> None:
            if unit in exit_of:
                features[exit_of[unit]] = feature

        with phase("forward"):
            if view is not None:
                of_step = view(step)
                made = [{n: of_step(n, p) for n, p in some.items()} for some in self.forward.tensors]
                seen = Forward(self.model, self.slices, *made, data=self.data, bfloat16=self.forward.bfloat16)
                seen.place_(True, self._generators)
                outputs = seen(x, padding, route, watch)
            else:
                outputs = self.forward(x, padding, route, watch)
                self.params.update({n: s for n, s in statistics(self.model).items() if n in self.params})
        held = self.held
        if route.exit is not None:  # nobody else answers
            held = held * torch.eye(len(held), device=held.device)[route.exit, :, None]
        labels = self.data.labels[to_device(rows, self.data.device)]
        return Batch(
            outputs, labels, padding[1], held, self.t, self.experiment.rounds, scratch, features, self.stack.owners,
            lambda name: self.teachers[name].at(batches, step, x), self.label_counts, self.federation.task,
            lambda: self.forward.place_(True, self._generators)(x, padding, route),
        )  # fmt: skip
