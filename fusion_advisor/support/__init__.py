"""Errors of one line, files written whole, child processes: no word of the project."""

OFFERS = (
    "codec",
    "errors",
    "files",
    "forkserver",
    "kept",
    "load_kernel_file",
    "worker",
)
"""The modules that other rooms may import."""
