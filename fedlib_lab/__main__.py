"""``python -m fedlib_lab``: the command line (``cli.py``).

Python then looks for its own modules in the working folder first: ``fedlib``, or ``python -P -m fedlib_lab``, does not.
"""

import sys

from .cli import main

sys.exit(main())
