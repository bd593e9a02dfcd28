"""The lab: what runs, stores, extends and shows, and all that the core knows by name alone (``fedlib/core/doors.py``).

It imports the core, never the reverse; whatever is here came in through a door that a user has too.
"""

from importlib.util import find_spec

from fedlib.core import doors

RIVALS = ("fedrolex", "fjord", "fiarse", "hetlora", "flexlora", "flora", "darkdistill", "fedproto")
NEEDS = ("filelock", "peft", "pyarrow", "timm")  # of the extra lab: without them the core is alone

if all(map(find_spec, NEEDS)):
    doors.METHODS |= {name: f"fedlib_lab.rivals.{name}" for name in RIVALS}
    doors.BACKBONES.append("fedlib_lab.zoo.families")
    doors.TUNERS.append("fedlib_lab.zoo.tuners")
    doors.READERS.append("fedlib_lab.formats.readers")
    doors.EXECUTORS["processes"] = "fedlib_lab.executors.processes:Processes"
    doors.EXECUTORS["stacked"] = "fedlib_lab.executors.stacked:Stacked"
    doors.EXECUTORS["ray"] = "fedlib_lab.executors.cluster:RayExecutor"
    doors.LAYERS.append("fedlib_lab.kernels")
