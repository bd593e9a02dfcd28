"""Which exit teaches: counted once a batch."""

from fedlib import build_federation
from fedlib_lab.papers.reefl.teachers import count_teachers


def test_teachers_are_counted_once_a_batch(tiny):
    f = build_federation(tiny)
    counts = count_teachers(f, f.server, cohort_size=2)
    top = [i for i in range(tiny.num_clients) if i % 4 == 3 and f.data.num_examples[i]]
    batches = sum(-(-int(f.data.num_examples[i]) // tiny.batch_size) for i in top)
    assert {z: int(c.sum()) for z, c in counts.items()} == {0.2: batches, 1.0: batches}
    same = count_teachers(f, f.server, cohort_size=1)
    assert all((same[z] == counts[z]).all() for z in counts)
