"""From a plan to a file: kernels, launcher, eager reference and self-test."""

OFFERS = (
    "eager_reference",
    "emit",
    "header",
    "held",
    "interface",
    "kernel_file",
    "kernel_package",
    "pair",
    "test_inputs",
    "tuned_numbers",
)
"""The modules that other rooms may import."""
