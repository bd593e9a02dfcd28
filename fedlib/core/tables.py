"""Tables that the package brings as YAML: shapes of backbones, families of models, data sets."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml


@cache
def read_table(file: Path) -> dict[str, Any]:
    """Read a YAML ``file``, its lists as tuples; entries whose names begin with a dot are only referred to."""

    def fixed(x: Any) -> Any:
        if isinstance(x, dict):
            return {k: fixed(v) for k, v in x.items() if str(k)[0] != "."}
        return tuple(map(fixed, x)) if isinstance(x, list) else x

    # libyaml's is 20 times as fast
    return fixed(yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
