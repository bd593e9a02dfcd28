"""Pre-training of the kit's own small backbones, beside the package: it made the weights that ship with it."""
