"""A federation and its rounds: cohorts trained as one batched program, evaluation, serving, privacy."""
