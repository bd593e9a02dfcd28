"""The lab: what runs, stores, extends and shows, and all that the core knows by name alone (``fedlib/core/doors.py``).

It imports the core, never the reverse; whatever is here came in through a door that a user has too.
"""

from fedlib.core import doors

RIVALS = ("fedrolex", "fjord", "fiarse", "hetlora", "flexlora", "flora", "darkdistill")  # of the atlas alone

doors.METHODS |= {name: f"fedlib.methods.sliced.{name}" for name in RIVALS}
doors.METHODS["fedproto"] = "fedlib.methods.personal.fedproto"
doors.BACKBONES.append("fedlib_lab.zoo")
doors.TUNERS.append("fedlib_lab.tuners")
doors.READERS.append("fedlib_lab.readers")
doors.EXECUTORS |= {
    "processes": "fedlib.engine.processes:Processes",
    "ray": "fedlib.engine.cluster:RayExecutor",
    "flower": "fedlib.engine.flower:FlowerExecutor",
}
doors.LAYERS.append("fedlib.kernels")
