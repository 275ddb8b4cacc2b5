"""Microseconds of launches and plans, by a model that was fitted to measurements."""
