"""Partitions by label that a paper's release defines and no library has; each is a function of (labels, options, seed).

``weighted_dirichlet``, ``capped_dirichlet`` and ``dealt_classes`` are FeDepth's alpha, alpha_u and beta;
``grouped_dirichlet`` is ScaleFL's, after FedDF. With ``test_split = like_train`` a client's test rows have the
proportions of its training rows, which is what ScaleFL gets by dividing both sets at once.

Deviations: FeDepth's release trains on most of its pathological split's hold-out examples, here nobody does. A client
is never dealt a class twice. What has to be drawn again is drawn at most ``TRIES`` times.
"""

from collections.abc import Sequence

import numpy as np

from ..core.rng import numpy_generator

TRIES = 10_000
GROUP = 10  # clients of a group (ScaleFL)
LEAST = 50  # examples of a client (FeDepth)


def weighted_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Divide evenly: client i draws P_i ~ Dir(alpha), then N // K of the examples left, weighted by their class's P_i.

    Unlike ``dirichlet_partition``, a class of which little is left is drawn less often, so late clients keep more of
    their proportions. The draw without replacement takes the smallest Exp(1) / weight (Efraimidis and Spirakis 2006).
    """
    rng = numpy_generator(seed, "partition")
    classes, size = int(labels.max()) + 1, len(labels) // num_clients
    left, out = rng.permutation(len(labels)), []
    for _ in range(num_clients):
        proportions = rng.dirichlet([alpha] * classes)
        with np.errstate(divide="ignore"):  # a proportion that underflows comes last
            keys = np.log(rng.standard_exponential(len(left))) - np.log(proportions[labels[left]])
        order = np.argsort(keys, kind="stable")
        out.append(np.sort(left[order[:size]]))
        left = np.delete(left, order[:size])
    return out


def capped_dirichlet(
    labels: np.ndarray, num_clients: int, alpha: float, seed: int, least: int = LEAST
) -> list[np.ndarray]:
    """Divide each class by Dir(alpha) over clients, none of it to clients that hold N / K already.

    Sizes are unbalanced.

    Drawn again until every client has ``least`` examples; ``ValueError`` where that cannot be or does not happen.
    """
    return _divide(np.arange(len(labels)), labels, num_clients, alpha, least, numpy_generator(seed, "partition"))


def grouped_dirichlet(labels: np.ndarray, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Divide nearly evenly: shuffle into groups of ten clients, each divided as by :func:`capped_dirichlet`.

    Every client gets at least half of its group's mean. The last group has the remaining clients.
    """
    rng = numpy_generator(seed, "partition")
    groups = [min(GROUP, num_clients - first) for first in range(0, num_clients, GROUP)]
    ends = np.cumsum(groups) * len(labels) // num_clients
    parts = []
    for rows, clients in zip(np.split(rng.permutation(len(labels)), ends[:-1]), groups, strict=True):
        parts += _divide(rows, labels, clients, alpha, -(-len(rows) // (2 * clients)), rng)
    return parts


def _divide(
    rows: np.ndarray, labels: np.ndarray, num_clients: int, alpha: float, least: int, rng: np.random.Generator
) -> list[np.ndarray]:
    if (mean := len(rows) / num_clients) < least:
        why = f"num_clients = {num_clients} is too many: with {len(rows)} examples a client has {mean:.1f}"
        raise ValueError(f"experiment: {why}, and the partition gives each at least {least}")
    pools = [p for c in np.unique(labels[rows]) if len(p := rng.permutation(rows[labels[rows] == c]))]
    for _ in range(TRIES):
        sizes, cuts = np.zeros(num_clients, np.int64), []
        for pool in pools:
            share = np.where(sizes < mean, rng.dirichlet([alpha] * num_clients), 0)
            share = share if share.sum() > 0 else (sizes < mean) / 1.0  # all of them underflowed
            cuts.append((np.cumsum(share / share.sum())[:-1] * len(pool)).astype(int))
            sizes += np.diff([0, *cuts[-1], len(pool)])
        if sizes.min() >= least:
            parts = zip(*(np.split(pool, cut) for pool, cut in zip(pools, cuts, strict=True)), strict=True)
            return [np.sort(np.concatenate(p)) for p in parts]
    why = f"dirichlet_alpha = {alpha} left a client with fewer than {least} examples {TRIES} times"
    raise ValueError(f"experiment: {why}; a larger alpha or fewer clients are possible")


def dealt_classes(labels: np.ndarray, num_clients: int, classes_per_client: int, seed: int) -> list[np.ndarray]:
    """Deal classes like cards, shuffled anew when all are out (pathological); a class's holders share it evenly.

    So classes have equally many holders, up to one, where flwr-datasets' ``pathological`` draws them independently.
    ``ValueError`` if there are not cards enough for every class.
    """
    rng, classes = numpy_generator(seed, "partition"), np.unique(labels)
    if len(classes) > (most := num_clients * classes_per_client):
        why = f"{num_clients} clients hold at most {most} of the {len(classes)} classes; partition = 'dealt' needs all"
        raise ValueError(f"experiment: classes_per_client = {classes_per_client}: {why}")
    return share_classes(labels, deal(classes.tolist(), num_clients, classes_per_client, rng), rng)


def cover_classes(labels: np.ndarray, parts: Sequence[np.ndarray], each: int, seed: int) -> list[np.ndarray]:
    """Give the classes that ``parts`` leave to nobody to clients, at most ``each`` classes a client.

    Such a class goes to a client that can hold one more, else to one of those that hold the class that most do, in its
    place; then the holders of every class share it evenly.
    """
    rng, hands = numpy_generator(seed, "partition"), [np.unique(labels[p]).tolist() for p in parts]
    for c in sorted(set(np.unique(labels).tolist()) - {c for hand in hands for c in hand}):
        held = [c for hand in hands for c in hand]
        most = max(sorted(set(held)), key=held.count)
        free = [hand for hand in hands if len(hand) < each] or [hand for hand in hands if most in hand]
        hand = free[rng.integers(len(free))]
        if len(hand) == each:
            hand.remove(most)
        hand.append(c)
    return share_classes(labels, hands, rng)


def share_classes(labels: np.ndarray, hands: Sequence[Sequence[int]], rng: np.random.Generator) -> list[np.ndarray]:
    """Shuffle every class's rows and divide them evenly among the clients whose ``hands`` have it."""
    parts: list[list[np.ndarray]] = [[] for _ in hands]
    for c in np.unique(labels).tolist():
        holders = [i for i, hand in enumerate(hands) if c in hand]
        rows = rng.permutation(np.where(labels == c)[0])
        for i, share in zip(holders, np.array_split(rows, len(holders)), strict=True):
            parts[i].append(share)
    return [np.sort(np.concatenate(p)) for p in parts]


def deal(cards: Sequence[int], players: int, each: int, rng: np.random.Generator) -> list[list[int]]:
    """Deal ``each`` different cards to every player; a card that a player has already waits for the next."""
    deck: list[int] = []
    hands = []
    for _ in range(players):
        hand: list[int] = []
        while len(hand) < each:
            if (card := next((c for c in deck if c not in hand), None)) is None:
                deck += rng.permutation(cards).tolist()
                continue
            deck.remove(card)
            hand.append(card)
        hands.append(hand)
    return hands
