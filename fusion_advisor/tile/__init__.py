"""Kernel IR: tile programs, between a schedule's plan and the text of a language."""

from __future__ import annotations

OFFERS = ("program", "text", "verify")
"""The modules that other rooms may import."""
