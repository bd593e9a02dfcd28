"""Which tests take long: ``python -m tests.helpers.long LOG`` writes ``tests/long.txt`` from a log of ``--durations=0 -vv``.

They run where what they test was touched, and in ``make test-all``. Of a test of many cases the quickest stays.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

LONG = Path(__file__).parents[1] / "long.txt"
SECONDS = 5.0  # of one case, on the machine and under the load of the log


def times(log: str) -> dict[str, float]:
    """Seconds of each test with its fixtures."""
    out: dict[str, float] = defaultdict(float)
    for seconds, test in re.findall(r"^ *([\d.]+)s (?:call|setup|teardown) +(tests/\S.*?) *$", log, re.M):
        out[test] += float(seconds)
    return out


def long_tests(seconds: dict[str, float]) -> list[str]:
    """Those of more than ``SECONDS``, but of the cases of one test the quickest, unless it is twice as long."""
    cases = defaultdict(list)
    for test in seconds:
        cases[test.partition("[")[0]].append(test)
    out = []
    for name, own in cases.items():
        slow = [test for test in own if seconds[test] > SECONDS]
        if (
            len(own) > 1
            and len(slow) == len(own)
            and (best := min(slow, key=lambda t: seconds[t]))
            and seconds[best] < 2 * SECONDS
        ):
            slow.remove(best)
        out += [name] if len(slow) == len(own) else slow
    return sorted(out)


if __name__ == "__main__":
    found = long_tests(times(Path(sys.argv[1]).read_text("utf-8")))
    LONG.write_text("".join(f"{test}\n" for test in found), "utf-8")
