"""Libraries that chatter are quiet, and the process is left as it was."""

import logging
import os
import subprocess
import sys
import textwrap
import warnings

import pytest


def test_dividing_leaves_logging_and_warnings_alone(tmp_path):
    """In a fresh process, so that the libraries are imported by the division itself."""
    code = """
        import logging, sys, warnings
        import numpy as np
        import fedlib.data.partition as partition

        handler = logging.NullHandler()
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(17)
        filters = list(warnings.filters)
        partition.partition_examples("class_dirichlet", np.arange(100) % 10, 5, 1)
        assert "flwr_datasets" in sys.modules
        root = logging.getLogger()
        assert (root.level, root.handlers, root.manager.disable) == (17, [handler], 0), (root.level, root.handlers)
        assert warnings.filters == filters, [f for f in warnings.filters if f not in filters]
        from datasets.utils import logging as remarks
        assert remarks.is_progress_bar_enabled() and remarks.get_verbosity() == logging.WARNING
    """
    environment = os.environ | {"FEDLIB_CACHE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "examples/s" not in done.stderr


def test_a_quiet_block_restores_what_it_found_even_when_it_fails():
    from datasets.utils import logging as remarks

    from fedlib.data.silence import silence_libraries

    before = logging.getLogger().level, list(logging.getLogger().handlers), list(warnings.filters)
    verbosity, shows = remarks.get_verbosity(), remarks.is_progress_bar_enabled()
    with pytest.raises(KeyError), silence_libraries():
        logging.getLogger().setLevel(1)
        logging.basicConfig(force=True)
        assert not remarks.is_progress_bar_enabled()
        raise KeyError
    assert (logging.getLogger().level, logging.getLogger().handlers, warnings.filters) == before
    assert (remarks.get_verbosity(), remarks.is_progress_bar_enabled()) == (verbosity, shows)
