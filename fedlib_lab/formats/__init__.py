"""Readers of files, archives and objects of one's own; ``readers.py`` is what the door leads to."""
