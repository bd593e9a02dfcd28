"""Layers that run a cohort: stacked parameters, masked norms, convolutions, what a lab may override."""
