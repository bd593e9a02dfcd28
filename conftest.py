"""Test-wide settings: nothing a test stores lands in the project's outputs."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
os.environ["FEDLIB_ROOT"] = str(ROOT)
os.environ["FEDLIB_OUTPUTS"] = tempfile.mkdtemp(prefix="fedlib-tests-")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
