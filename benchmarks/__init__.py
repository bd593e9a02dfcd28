"""The engine benchmark: the same federated workloads in fedlib, in bare PyTorch and in other frameworks."""
