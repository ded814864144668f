"""Checkpoints of training frameworks: a module each, imported only with its framework, on the public API alone."""
