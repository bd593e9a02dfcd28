"""Which tests wait for `make test-all`: those that take long, named by what a run of the suite took."""

from pathlib import Path

from tests.helpers.long import LONG, long_tests, times

ROOT = Path(__file__).parents[2]


def test_what_waits_exists():
    """A test that was renamed would be run again each time, and nobody would know why."""
    for line in LONG.read_text("utf-8").splitlines():
        path, _, name = line.partition("[")[0].partition("::")
        assert f"def {name}(" in (ROOT / path).read_text("utf-8"), line
    assert LONG.read_text("utf-8").splitlines() == sorted(LONG.read_text("utf-8").splitlines())


def test_of_a_tests_cases_the_quickest_stays():
    log = """
  20.00s call     tests/a/test_b.py::test_one
   4.00s setup    tests/a/test_b.py::test_two
   0.50s call     tests/a/test_b.py::test_two
   6.00s call     tests/a/test_b.py::test_three[x]
   7.00s call     tests/a/test_b.py::test_three[y y]
   1.00s call     tests/a/test_b.py::test_four[x]
   9.00s call     tests/a/test_b.py::test_four[y]
  30.00s call     tests/a/test_b.py::test_five[x]
  40.00s call     tests/a/test_b.py::test_five[y]
"""
    assert times(log)["tests/a/test_b.py::test_two"] == 4.5
    names = ("test_five", "test_four[y]", "test_one", "test_three[y y]")
    assert long_tests(times(log)) == [f"tests/a/test_b.py::{name}" for name in names]
