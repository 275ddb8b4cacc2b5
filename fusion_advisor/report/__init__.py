"""Report of a model: schema, assembly from the stages' records, formats, diff."""

OFFERS = (
    "assemble",
    "diff",
    "formats",
    "redact",
    "schema",
)
"""The modules that other rooms may import."""
