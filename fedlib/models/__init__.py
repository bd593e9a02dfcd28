"""Backbones that run unit by unit, exits, adapters, and what a slice of them costs."""
