"""Data sets that stand in for others, profile by profile."""

from fedlib.runs.params import load_grid


def test_a_stand_in_counts_at_its_profile_only():
    of = {p: {c.column: c.experiment for c in load_grid("reefl", "table1", p, {"columns": ["femnist", "speech_commands"]})}
          for p in ("paper", "small", "smoke", "demo")}  # fmt: skip
    assert {p: (x["femnist"].dataset, x["speech_commands"].dataset) for p, x in of.items()} == {
        "paper": ("femnist", "speech_commands"), "small": ("omniglot", "fsdd"), "smoke": ("omniglot", "fsdd"),
        "demo": ("mnist", "mnist"),
    }  # fmt: skip
    e = of["small"]["speech_commands"]
    assert (e.partition, e.num_clients, e.num_train, e.rounds, e.augment) == ("natural_split", 60, None, 100, "none")
    assert of["paper"]["femnist"].partition == "natural" and of["paper"]["femnist"].num_clients == 381
    # whoever names a data set gets the profile's partition of it, not the stand-in's
    own = load_grid("reefl", "table1", "small", {"columns": ["femnist"], "dataset": "mnist", "num_train": 4000})
    assert {(c.experiment.partition, c.experiment.num_clients) for c in own} == {("dirichlet", 100)}
