"""Command line: ``joestar train``, ``joestar info`` and ``joestar doctor``."""
