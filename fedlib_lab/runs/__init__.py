"""Experiments as runs: params, identity, store, checkpoints, costs, several side by side, export."""
