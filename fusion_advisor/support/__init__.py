"""Errors of one line, files written whole, child processes: no word of the project."""

OFFERS = (
    "codec",
    "errors",
    "files",
    "forkserver",
    "kept",
    "kernel_fault",
    "worker",
)
"""The modules that other rooms may import."""
