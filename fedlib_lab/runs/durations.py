"""How long runs take on this machine: from rounds of like runs, or from a second of training steps."""

from collections.abc import Sequence

from fedlib.core.experiment import Experiment
from fedlib.engine.executors import ADDRESSES, Execution

from .latency import product_macs_per_second, timed_macs_per_second
from .prices import gpu_hours, num_classes, num_parameters, training_macs

LARGE = 300_000_000  # parameters
ALIKE = ("finetune", "method", "dataset", "augment", "num_exits", "precision", "evaluate_every")  # by importance


def about(seconds: float) -> str:
    """A duration as one says it, no finer than it is known."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 45:
        return "under a minute"
    if minutes < 90:
        return f"about {max(1, minutes)} minute{'s' if minutes > 1 else ''}"
    return f"about {hours:.0f} hours" if hours < 48 else f"about {hours / 24:,.0f} days"


class Pace:
    """Seconds a round, as seen on this machine."""

    def __init__(self):
        self.seen: dict[Experiment, tuple[float, int]] = {}  # seconds, rounds

    def add(self, e: Experiment, seconds: float, rounds: int) -> None:
        """``rounds`` of ``e`` took so many seconds here."""
        s, n = self.seen.get(e, (0.0, 0))
        self.seen[e] = s + seconds, n + rounds

    def seconds_a_round(self, e: Experiment) -> float | None:
        """The mean over the most similar experiments, in proportion to their examples; None without this backbone."""
        seen = {o: sn for o, sn in self.seen.items() if o.backbone == e.backbone and sn[1]}
        if e in seen:
            return seen[e][0] / seen[e][1]
        likeness = {o: [getattr(o, k) == getattr(e, k) for k in ALIKE] for o in seen}
        best = [o for o in seen if likeness[o] == max(likeness.values())]
        return sum(seen[o][0] / seen[o][1] * _ratio(e, o) for o in best) / len(best) if best else None


def _ratio(e: Experiment, other: Experiment) -> float:
    """Examples a round of ``e`` to those of ``other``, as far as their fields tell."""
    clients = e.clients_per_round * e.local_epochs / (other.clients_per_round * other.local_epochs)
    if e.num_train is None or other.num_train is None:
        return clients
    return clients * (e.num_train / e.num_clients) / (other.num_train / other.num_clients)


def each_seconds(missing: Sequence[Experiment], pace: Pace, execution: Execution = Execution()) -> list[float]:
    """What each of ``missing`` takes: from ``pace`` where it knows their like, else from timed steps and MACs.

    Workers are taken to work side by side without loss.
    """
    rates: dict[tuple, float] = {}
    workers = (execution.workers or 1) if execution.executor in ADDRESSES else execution.side_by_side()
    out = []
    for e in missing:
        seconds = pace.seconds_a_round(e)
        if seconds is None and (kind := (e.backbone, e.finetune)) not in rates:
            rates[kind] = workers * macs_per_second(e, execution.home)
        out.append(training_macs(e) / rates[kind] if seconds is None else e.rounds * seconds)
    return out


def macs_per_second(e: Experiment, device: str) -> float:
    """In training, on one thread or GPU: timed, or of a model that would take minutes to build, as matrix products."""
    if num_parameters(e) > LARGE:
        return product_macs_per_second(device)
    return timed_macs_per_second(e, num_classes(e), device)


def describe(
    experiments: Sequence[Experiment], missing: Sequence[Experiment], pace: Pace, execution: Execution = Execution()
) -> str:
    """One line: how many runs, how many of them are missing, and about how long these take on this machine.

    More than a day's are also priced in hours of an A100.
    """
    seconds = sum(each_seconds(missing, pace, execution))
    text = f"{len(experiments)} runs, {len(missing)} to do: {about(seconds)} on this machine"
    if seconds < 24 * 3600:
        return text
    return f"{text}, or {gpu_hours(missing):,.0f} hours of a GPU (an A100; fedlib explain PAPER/TABLE --cost says more)"
