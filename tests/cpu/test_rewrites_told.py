"""Rewrites in the report of `analyze` and in what `patch` says: where, what to write, and when
Dynamo is asked at all. test_rewrites holds the rewrites themselves to their meaning."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion_advisor as fa
from fusion_advisor.frontend.child import capture_here
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.formats import text, wording
from fusion_advisor.report.redact import redacted
from fusion_advisor.report.schema import Report, RewriteRow
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.workflows.rewrites import finding_rewrites, with_rewrites

from . import spawned

HEAD = """
import math
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
"""
OPERANDS = """

def get_inputs():
    return [torch.randn(2, n, 1024, 64, dtype=torch.bfloat16) for n in ({heads})]
"""
CAUSAL = """\
    def forward(self, q, k, v):
        for _ in range(2):
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
            q = F.scaled_dot_product_attention(q, k, v, mask, scale=0.1)
        return q
"""
REPEATED = """\
    def forward(self, q, k, v):
        k = k.repeat_interleave(4, dim=1)
        v = v[:, :, None].expand(-1, -1, 4, -1, -1).reshape(q.shape)
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )
"""
BY_HAND = """\
    def forward(self, q, k, v):
        scores = q @ k.transpose(-2, -1) * 0.5
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -math.inf).float().softmax(-1)
        return weights.to(q.dtype) @ v
"""
LOSS = """\
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(256, 128256, bias=False, dtype=torch.bfloat16)

    def forward(self, x, labels):
        logits = self.head(x)
        return F.cross_entropy(logits.view(-1, 128256), labels.view(-1))


def get_inputs():
    return [torch.randn(8, 1024, 256, dtype=torch.bfloat16), torch.randint(0, 128256, (8, 1024))]
"""
PADDED = """\
    def forward(self, q, k, v, padding):
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = seen[None, None] & padding.bool()[:, None, None]
        return F.scaled_dot_product_attention(q, k, v, mask)


def get_inputs():
    given = [torch.randn(8, 32, 4096, 64, dtype=torch.bfloat16) for _ in range(3)]
    return [*given, torch.ones(8, 4096, dtype=torch.int64)]
"""
WINDOW = """\
    def forward(self, q, k, v):
        i = torch.arange(q.shape[2])
        mask = (i[:, None] >= i) & (i[:, None] - i < 7)
        return F.scaled_dot_product_attention(q, k, v, mask)
"""
PLAIN = """\
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).softmax(-1)
"""
DISABLED = CAUSAL.replace("    def", "    @torch._dynamo.disable\n    def", 1)
SAME = OPERANDS.format(heads="8, 8, 8")
MODELS = {
    "causal": CAUSAL + SAME, "repeated": REPEATED + OPERANDS.format(heads="32, 8, 8"),
    "by_hand": BY_HAND + SAME, "loss": LOSS, "padded": PADDED, "window": WINDOW + SAME,
    "plain": PLAIN + SAME, "disabled": DISABLED + SAME,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("models")
    for name, body in MODELS.items():
        (here / f"{name}.py").write_text(HEAD + body)
    return here


def analysed(folder: Path, name: str, *words: str) -> Report:
    done = spawned.command(
        "analyze", f"{name}.py", "--device", "h200", "--no-verify", "--no-compile", "--no-cache",
        "--json", "-", *words, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Report.model_validate(json.loads(done.stdout))


def rewrite_of(report: Report) -> RewriteRow:
    (row,) = report.rewrites
    assert not report.not_rewritten
    assert report.totals.rewrites_saved_us == (row.saved_us or 0.0)
    return row


def lines_of(row: RewriteRow) -> list[int]:
    return [source.line for source in row.sources]


def test_a_causal_mask_is_told_once_at_its_line(folder: Path) -> None:
    report = analysed(folder, "causal")
    row = rewrite_of(report)
    assert (row.code, row.sources[0].file, lines_of(row)) == (
        "needless-mask",
        "causal.py",
        [11, 10],
    )
    assert row.line == "F.scaled_dot_product_attention(q, k, v, scale=0.1, is_causal=True)"
    assert row.proof.startswith("its mask is causal; proven from")
    advice, idle = sorted(report.advice, key=lambda each: each.code, reverse=True)
    assert (advice.code, idle.code) == ("masked-attention", "launch-bound")
    assert row.advice == [advice.id]
    assert row.saved_us == pytest.approx(advice.saved_us)
    made = {node.name: node.op for node in report.nodes}
    assert {made[name] for name in row.nodes} == {
        "aten.ones.default", "aten.tril.default", "aten.scaled_dot_product_attention.default",
    }  # fmt: skip
    assert len(row.nodes) == 6
    told = next(each for each in wording.advised(report) if each.id == advice.id)
    assert told.code == "needless-mask"
    said = text.render(report)
    assert "needless-mask at causal.py:11" in said
    assert "masked-attention" not in said


def test_repeated_heads_are_told_with_both_copies(folder: Path) -> None:
    report = analysed(folder, "repeated")
    row = rewrite_of(report)
    assert (row.code, lines_of(row)) == ("grouped-heads", [11, 9, 10])
    assert row.line == "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)"
    assert row.saved_us == pytest.approx(sum(each.saved_us or 0.0 for each in report.advice))
    assert row.advice == [each.id for each in report.advice]
    assert len(wording.advised(report)) == 1


def test_attention_by_hand_is_one_rewrite_with_its_mask(folder: Path) -> None:
    row = rewrite_of(analysed(folder, "by_hand"))
    assert (row.code, sorted(lines_of(row))) == ("attention-by-hand", [9, 10, 11, 12])
    assert row.line == (
        "torch.nn.functional.scaled_dot_product_attention"
        "(query, key, value, is_causal=True, scale=0.5)"
    )
    assert "its mask is causal" in row.proof
    assert row.saved_us
    assert row.advice == []


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_a_loss_in_chunks_has_no_line_to_write(folder: Path, mode: str) -> None:
    report = analysed(folder, "loss", "--mode", mode)
    row = rewrite_of(report)
    assert (row.code, row.line, sorted(lines_of(row))) == ("linear-cross-entropy", None, [13, 14])
    assert "chunked_loss=True" in row.message
    advised = [each for each in report.advice if each.code == "materialised-logits"]
    assert row.advice == [each.id for each in advised]
    assert bool(row.saved_us) == (mode == "train")


def test_what_holds_without_padding_alone_has_no_line_to_write(folder: Path) -> None:
    row = rewrite_of(analysed(folder, "padded"))
    assert (row.code, row.line) == ("needless-mask", None)
    assert "where there is no padding" in row.proof


def test_what_dynamo_cannot_capture_is_one_line(folder: Path) -> None:
    report = analysed(folder, "disabled")
    assert report.rewrites == []
    assert report.not_rewritten.startswith("Dynamo captures no graph")
    assert sorted(each.code for each in report.advice) == ["launch-bound", "masked-attention"]
    assert "not looked for everywhere: Dynamo captures" in text.render(report)


@pytest.mark.parametrize("name", ["plain", "window"])
def test_other_models_do_not_run_dynamo(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("Dynamo was asked")

    monkeypatch.setattr(torch, "compile", compiled)
    graph = looked_at(folder / f"{name}.py")
    assert (graph.rewrites, graph.not_rewritten) == ((), "")
    assert looked_at(folder / "causal.py").not_rewritten.endswith(
        "see what torch.compile says of it"
    )


def looked_at(file: Path) -> Graph:
    following = finding_rewrites(())
    assert following
    most = load_rulebook(()).capture.mask_elements.count
    return capture_here(
        str(file), Scenario(), mask_elements=most, then=partial(with_rewrites, following.given)
    )


def test_a_live_model_is_looked_at_as_a_file_is() -> None:
    class Attending(torch.nn.Module):
        def forward(self, q: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    report = fa.analyze(Attending(), torch.empty(2, 4, 64, 32), verify=False, compile=False)
    row = rewrite_of(report)
    assert row.sources[0].file.endswith("test_rewrites_told.py")
    assert row.line == ("torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)")


def test_a_redacted_report_has_no_line_of_the_model(folder: Path) -> None:
    row = rewrite_of(redacted(analysed(folder, "causal")))
    assert (row.line, row.sources[0].file) == (None, "file1.py")


def test_patch_says_what_to_write(folder: Path) -> None:
    done = spawned.command(
        "patch", "causal.py", "--root", ".", "--out", "x.diff", "--no-verify", "--no-compile",
        cwd=folder,
    )  # fmt: skip
    (said,) = [line for line in done.stderr.splitlines() if "needless-mask" in line]
    assert said == (
        "causal.py:11: needless-mask: its mask is causal; write F.scaled_dot_product_attention"
        "(q, k, v, scale=0.1, is_causal=True) (fusion-advisor explain needless-mask)"
    )
