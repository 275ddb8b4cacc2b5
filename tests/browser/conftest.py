"""A headless Chromium, and pages that it opens from disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import Report

NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--no-sandbox", "--disable-gpu", "--disable-software-rasterizer", "--disable-quic",
    "--no-first-run", "--disable-sync", "--disable-background-networking",
    "--disable-component-update",
)  # fmt: skip
WIDE = {"width": 1440, "height": 900}


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium here: {', '.join(NAMES)}")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(OPTIONS))
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """`opened(report, at, **context)`: the report's page, drawn. At the end it must have asked for
    nothing but itself, and neither said nor thrown anything."""
    said: list[str] = []
    asked: list[str] = []
    contexts: list[Any] = []

    def visit(report: Report | Path, at: str = "", **context: Any) -> Any:
        file = report if isinstance(report, Path) else tmp_path / "report.html"
        if isinstance(report, Report):
            file.write_text(render(report, "html"), encoding="utf-8")
        contexts.append(browser.new_context(**{"viewport": WIDE, **context}))
        page = contexts[-1].new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{file.as_uri()}{at}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith("file:")] == []
    assert len(asked) == len(contexts)
