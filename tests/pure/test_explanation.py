"""What `explain` says of a rule, and the page that is made of it. `--regen` rewrites the page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.rulebook.explain import Rule, entry, explanation, page, rules
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

DOCS = Path(__file__).resolve().parents[2] / "docs"
RULES = load_rulebook()


def test_the_page_of_the_rules_is_as_explain_writes_it(
    golden: Callable[[str | Path, str], None],
) -> None:
    golden(DOCS / "rules.md", page(RULES))


@pytest.mark.parametrize("rule", [*RULES.gates.values(), *RULES.patterns.values()])
def test_every_gate_and_idiom_shows_both_sides_or_says_why_not(rule: Rule) -> None:
    text = explanation(RULES, rule)
    assert text.count("def forward(") == (2 if "never fails: " not in text else 1)


@pytest.mark.parametrize("rule", rules(RULES), ids=lambda rule: rule.name)
def test_an_explanation_is_no_wider_than_a_terminal(rule: Rule) -> None:
    text = explanation(RULES, rule)
    lines = [line for line in text.splitlines()[1:] if "def " not in line]
    assert max(map(len, lines)) <= 98


def test_a_gate_says_what_it_read_of_its_examples() -> None:
    text = explanation(RULES, entry(RULES, "FA401"))
    assert "  holds, at 1.5 x\n      # a=1024x4096:float32 b=" in text
    assert "  fails, at 1.25 x: the norm is one kernel already" in text
    assert "  unknown: a value meets its own transpose" in explanation(RULES, RULES.gate("FA901"))


WRONG = {
    "def forward(x):\n    return (x": "code: expected Python",
    "def other(x):\n    return x": "code: expected one function, forward",
    "def forward(y):\n    return y": "forward takes y; inputs x",
}


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_example_is_one_line_with_its_field(code: str, tmp_path: Path) -> None:
    overlay = tmp_path / "mine.toml"
    overlay.write_text(f"[gates.on-chip.holds]\ncode = '''{code}'''\n")
    with pytest.raises(UsageError, match=r"on-chip\.holds: ") as error:
        load_rulebook([overlay])
    assert WRONG[code] in str(error.value)
    assert "\n" not in str(error.value)
