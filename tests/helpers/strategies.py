"""Values that hypothesis draws."""

from hypothesis import strategies as st

positive = st.integers(1, 10**6)
rate = st.floats(1e-6, 1e6)
scalar = st.one_of(st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False),
                   st.text(max_size=20), st.none(), st.lists(st.integers(0, 9), max_size=3))  # fmt: skip
experiments = st.fixed_dictionaries(
    {},
    optional={
        "method": st.text(max_size=30), "options": st.dictionaries(st.text(max_size=9), scalar, max_size=3),
        "dataset": st.text(max_size=60), "num_train": st.none() | positive, "dirichlet_alpha": rate,
        "partition": st.sampled_from(["dirichlet", "class_dirichlet", "pathological", "natural", "iid"]),
        "pretrained": st.booleans(), "exit_blocks": st.none() | st.just([2, 5, 8, 11]), "rounds": positive,
        "num_clients": st.integers(10, 10**6), "batch_size": positive, "lr": st.floats(0.001, 1e6) | st.integers(1, 99),
        "momentum": st.floats(0, 0.99), "clip_value": st.none() | rate, "seed": st.integers(0, 2**62),
        "nonfinite": st.sampled_from(["record", "drop", "fail"]),
    },
)  # fmt: skip
