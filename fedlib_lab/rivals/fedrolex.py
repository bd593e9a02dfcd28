"""FedRolex (Alam et al., NeurIPS 2022): sub-models cut in width by a window that rolls over the whole net.

Round t, client (rate b): of every n channels (features of each attention head) the floor(b n) that start at entry
t - 1 mod n, around the end; the whole depth, one exit. So every entry is trained, and after n rounds each as often.
Else it is HeteroFL: outputs that enter a norm are divided by b, the cross-entropy sees zero for classes that the client
has no example of, of the classifier it sends its classes' rows, and the server takes the plain mean over the holders of
each entry. Budgets are the rates; ``dynamic`` draws every client's rate anew in every round.
Read next: ``heterofl.py`` (what is the same), ``core/slices.py`` (``Axis.rolling``).

Deviations: ``windows="release"`` are its windows: they roll downwards and are ceil(b n) long. The release rolls queries
and keys as one list, so that heads mix, and weights norms and biases by the order of the clients; neither is done. A
client's own answer is that of the sub-model that it would train last, with ``dynamic`` or ``answers="whole"`` the whole
model's. Where no client holds the whole, the last window of the largest rate answers in its place, and not, as in the
paper, a net that is larger than any client's. The release answers with batch norm's statistics of the test batch: the
experiment's ``batch_norm="batch"``.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

from fedlib.methods.base import Round, Slice
from fedlib.methods.sliced.heterofl import ScaledRates
from fedlib.methods.widths import rounded_up


@dataclass(frozen=True)
class FedRolex(ScaledRates):
    """Five rates, kept by each client."""

    label, color, marker = "FedRolex", "#e6695e", "p"

    one_slice: ClassVar[bool] = False

    windows: Literal["paper", "release"] = "paper"

    def kept(self, rate: float, size: int) -> int:
        return max(1, math.floor(rate * size + 1e-9)) if self.windows == "paper" else rounded_up(rate, size)

    def part(self, rate: float, r: Round) -> Slice:
        """Cut the window of ``rate`` in this round."""
        start = r.t - 1 if self.windows == "paper" else 1 - r.t
        return r.setting.cut(partial(self.kept, rate), scale=rate if self.scaler else 1.0, start=start)
