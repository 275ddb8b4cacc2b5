"""Pull requests: settings, policy, conditions, ignores, baselines."""

OFFERS = (
    "baseline",
    "cache",
    "conditions",
    "configuration",
    "findings",
    "init",
    "policy",
    "scenarios",
)
"""The modules that other rooms may import."""
