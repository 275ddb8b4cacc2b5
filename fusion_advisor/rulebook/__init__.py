"""The numbers of `rules/`, each with unit and source, and the devices they describe."""

OFFERS = (
    "devices",
    "explain",
    "load",
    "local_gpu",
    "quantities",
    "schema",
)
"""The modules that other rooms may import."""
