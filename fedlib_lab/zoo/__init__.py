"""Backbones and tuners beyond the core's; ``families.py`` and ``tuners.py`` are what the doors lead to."""
