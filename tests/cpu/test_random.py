"""Random numbers: what is drawn, that every kernel draws it, and what launchers do with seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.codegen.emit import emit
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.region.random import SHARES, threshold
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import submit_check

from .evaluating import reference_functions
from .generated import kernel
from .regions import LOADED, RULES, decided, flow_of, interpreted, why_not

Tensor = torch.Tensor
DRAW = reference_functions()
COUNT = 1 << 20
KINDS = sorted(SHARES)


def bits(kind: str, seed: int = 5, offset: int = 9, stream: int = 0, count: int = COUNT) -> Tensor:
    return DRAW["random_bits"]((count,), SHARES[kind], seed, offset, stream, "cpu")


# -- what is drawn ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        (0, 0, (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        (2**32 - 1, 2**64 - 1, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_known_answers_of_seven_rounds(counter: int, key: int, words: tuple[int, ...]) -> None:
    """The vectors that Random123 publishes: all bits of counter and key 0, or 1."""
    assert _rounds([counter] * 4, key) == list(words)


def _rounds(counter: list[int], key: int) -> list[int]:
    """Philox-4x32 as the paper defines it, in whole numbers."""
    low = 2**32 - 1
    left, right = key & low, key >> 32
    for _ in range(7):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ left,
            second & low,
            first >> 32 ^ counter[3] ^ right,
            first & low,
        ]
        left, right = (left + 0x9E3779B9) & low, (right + 0xBB67AE85) & low
    return counter


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_blocks_are_those_of_the_paper(seed: int) -> None:
    offset, number, stream = 2**45 + 77, 2**33 + 5, 3
    low = 2**32 - 1
    counter = [number & low, (number >> 32) + (stream << 16), offset & low, offset >> 32]
    wanted = _rounds(counter, seed % 2**64)
    for state in ((seed, offset), (torch.tensor(seed), torch.tensor(offset))):
        found = DRAW["philox"](*state, stream, torch.tensor([number]))
        assert found[0].tolist() == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_repeats_and_others_differ(kind: str) -> None:
    first = bits(kind)
    assert torch.equal(first, bits(kind))
    for other in (bits(kind, seed=6), bits(kind, offset=10), bits(kind, stream=1)):
        assert (first == other).float().mean() < 1e-4
    assert first.unique().numel() > 0.999 * COUNT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-3, 1 / 65536 / 3])
def test_the_share_of_dropped_elements(kind: str, p: float) -> None:
    """Within 4.5 standard deviations of the binomial; p is met to 2**-32, even below 2**-16."""
    least = threshold(p)
    assert abs((least + 2**31) / 2**32 - p) <= 2**-33
    dropped = sum(int((bits(kind, seed=s) < least).sum()) for s in range(4))
    count = 4 * COUNT
    assert abs(dropped - count * p) < 4.5 * (count * p * (1 - p)) ** 0.5 + 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.3217])
def test_elements_do_not_hang_together(kind: str, p: float) -> None:
    """No correlation with neighbours, with those of the next block, across streams and offsets:
    each within 5 standard deviations of none."""
    found = (bits(kind) < threshold(p)).double() - p
    for lag in (1, 2, 3, 4, 7, 8, 16, 1024):
        _uncorrelated(found[:-lag], found[lag:], p)
    for place in range(SHARES[kind]):  # each pair within a block
        for other in range(place):
            columns = found.reshape(-1, SHARES[kind])
            _uncorrelated(columns[:, place], columns[:, other], p)
    _uncorrelated(found, (bits(kind, stream=1) < threshold(p)).double() - p, p)
    _uncorrelated(found, (bits(kind, offset=10) < threshold(p)).double() - p, p)


def _uncorrelated(left: Tensor, right: Tensor, p: float) -> None:
    correlation = float((left * right).mean()) / (p * (1 - p))
    assert abs(correlation) < 5 / left.numel() ** 0.5


def test_uniform_and_normal_numbers() -> None:
    uniform = DRAW["uniform"](24, bits("random32")).double()
    assert uniform.min() >= 0
    assert uniform.max() < 1
    counts = torch.histc(uniform, 64, 0, 1)
    chi = float(((counts - COUNT / 64) ** 2).sum() / (COUNT / 64))
    assert chi < 63 + 5 * (2 * 63) ** 0.5
    between = DRAW["between"](24, bits("random32"))
    assert between.dtype == torch.float32
    assert between.min() > 0
    assert between.max() < 1
    normal = DRAW["normal"](between, DRAW["uniform"](24, bits("random32", stream=1))).double()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        spread = (96 / COUNT) ** 0.5  # the fourth power has the largest variance: 96
        assert abs(float((normal**power).mean()) - moment) < 5 * spread
    wide = DRAW["uniform"](53, bits("random32"), bits("random32", stream=1))
    assert wide.dtype == torch.float64
    assert (wide * 2**53 % 2**20).unique().numel() > 1000  # digits beyond float32's


# -- every kernel draws it -------------------------------------------------------------------------


def e(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def residual(a: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    h = r + F.dropout(a, 0.1, True)
    return h, h * torch.rsqrt(h.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(h.dtype) * g


def masked(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.native_dropout(x, 0.3, True)


KERNELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str]] = {
    "flat": (lambda x: F.dropout(F.gelu(x), 0.1, True), (e(64, 500),), "flat"),
    "its mask": (masked, (e(40, 333),), "flat"),
    "broadcast": (lambda x, b: masked(x + b), (e(7, 40, 333), e(333)), "flat"),
    "tiled": (lambda x, b: masked(x + b), (e(7, 40, 333), e(40, 1)), "tiled"),
    "transposed": (lambda x: masked(x.mT.contiguous() * 2), (e(3, 100, 130),), "tiled"),
    "row": (lambda x: masked(x.softmax(-1)), (e(40, 640),), "row"),
    "odd row": (lambda x: masked(x.softmax(-1)), (e(40, 333),), "row"),
    "short rows": (lambda x: masked(x.softmax(-1)), (e(400, 5),), "row"),
    "columns": (lambda x: masked(x.softmax(1)), (e(6, 50, 40),), "row"),
    "residual norm": (residual, (e(40, 1000), e(40, 1000), e(1000)), "row"),
    "carried": (
        lambda x: F.dropout(F.layer_norm(x, (256,)), 0.1, True).amax(0), (e(700, 256),), "carried",
    ),
    "blocked": (lambda x: masked(x.softmax(-1)), (e(300, 100_000),), "blocked"),
    "split": (lambda x: masked(x.softmax(-1)), (e(4, 100_000),), "split"),
    "scalar": (lambda x: F.dropout(x, 0.1, True).amax(), (e(300, 4000),), "split"),
    "within lanes": (
        lambda x: F.avg_pool2d(F.dropout(x, 0.1, True), 2), (e(2, 3, 10, 12),), "flat",
    ),
    "a slice": (lambda x: F.dropout(x, 0.1, True)[:, 3:200] * 2, (e(30, 400),), "tiled"),
    "joined": (
        lambda x, y: torch.cat([F.dropout(x, 0.1, True), y.exp()], 1) * 2,
        (e(30, 40), e(30, 33)), "tiled",
    ),
    "two draws": (
        lambda x, y: F.dropout(x * 2, 0.25, True) + F.dropout(y, 0.5, True),
        (e(30, 63), e(30, 63)), "flat",
    ),
    "one for each channel": (
        lambda x: F.dropout2d(x.relu(), 0.25, True), (e(3, 10, 7, 9),), "flat",
    ),
    "alpha dropout": (lambda x: F.alpha_dropout(x * 2, 0.25, True), (e(3, 10, 63),), "flat"),
    "drop path": (
        lambda x, y: x + y * (torch.rand(x.shape[0], 1, 1) < 0.8), (e(6, 20, 63), e(6, 20, 63)),
        "flat",
    ),
    "noise": (lambda x: x + torch.randn_like(x) * 0.1, (e(30, 63, dtype=torch.float32),), "flat"),
    "noise in float64": (
        lambda x: x + torch.randn_like(x) * 0.1, (e(30, 63, dtype=torch.float64),), "flat",
    ),
    "uniform in float64": (
        lambda x: x * torch.rand_like(x), (e(9, 63, dtype=torch.float64),), "flat",
    ),
    "gumbel softmax": (lambda x: F.gumbel_softmax(x), (e(30, 63, dtype=torch.float32),), "row"),
    "coins": (lambda x: torch.bernoulli(x) * x.sigmoid(), (e(30, 63),), "flat"),
    "nothing dropped": (lambda x: F.dropout(x.exp(), 0.0, True), (e(60, 50),), "flat"),
    "everything dropped": (lambda x, y: y + F.dropout(x, 1.0, True), (e(6, 50), e(6, 50)), "flat"),
}  # fmt: skip


def drawn_kernel(name: str) -> tuple[Kernel, str]:
    function, inputs, _ = KERNELS[name]
    flow = flow_of(function, *inputs, mode="train")
    decision = decided(flow)
    assert decision.subject.plan is not None, why_not(decision)
    return emit(flow, decision, "k", RULES), decision.subject.plan.schedule


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_draw_as_their_reference(name: str, worker: Worker) -> None:
    """Masks are results in many of these: compared bit for bit, at odd sizes too."""
    made, schedule = drawn_kernel(name)
    assert schedule == KERNELS[name][2]
    check = submit_check(worker, made, seeds=3, timeout_s=200)()
    assert check.failure is None


def test_rows_share_blocks_where_they_can() -> None:
    text = drawn_kernel("row")[0].text
    assert "random16_run(seed, offset, 0, row * cols, COLS, SHARED)" in text
    assert "SHARED=n1 % 8 == 0" in text
    assert "random16(seed, offset, 0, " in drawn_kernel("a slice")[0].text


def test_what_draws_alone_is_refused() -> None:
    flow = flow_of(lambda x: torch.rand_like(x) * 2, e(30, 63))
    assert "names the device" in why_not(decided(flow))


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_computed_probability_has_to_be_rounded_as_eager_stores_it(
    dtype: torch.dtype, refused: bool
) -> None:
    decision = decided(flow_of(lambda x: torch.bernoulli(x.sigmoid()) * x, e(30, 63, dtype=dtype)))
    failed = [gate.name for gate in decision.gates if gate.outcome == "fails"]
    assert ("discontinuous" in failed) == refused


# -- the launchers ---------------------------------------------------------------------------------

_CHILD = (
    LOADED
    + """
os.environ["FUSION_ADVISOR_STRICT"] = "1"
x = torch.randn(37, 500).to(torch.bfloat16)
def same(left, right):
    return torch.equal(left, right)

found = {}
before = torch.get_rng_state()
given = module.dropout_gelu(x, 12, 34)
found["a seed leaves the generator alone"] = same(torch.get_rng_state(), before)
tensors = torch.tensor(12), torch.tensor([34])
found["tensors as ints"] = same(given, module.dropout_gelu(x, *tensors))
found["as the reference"] = same(given == 0, module.reference(x, 12, 34) == 0)
found["offset"] = not same(given, module.dropout_gelu(x, 12, 35))
found["no offset is 0"] = same(module.dropout_gelu(x, 12), module.dropout_gelu(x, 12, 0))
torch.manual_seed(1)
first, second = module.dropout_gelu(x), module.dropout_gelu(x)
found["drawn anew"] = not same(first, second)
torch.manual_seed(1)
found["as torch is seeded"] = same(first, module.dropout_gelu(x))
seed = torch.tensor(12)
module.dropout_gelu(x, seed, 34)
seed.fill_(13)
found["a tensor is read when the kernel runs"] = same(
    module.dropout_gelu(x, seed, 34), module.dropout_gelu(x, 13, 34)
)
try:
    module.dropout_gelu(x, torch.tensor(12.0), 34)
except RuntimeError as error:
    found["a wrong seed is named"] = "seed has dtype" in str(error)
print(json.dumps(found))
"""
)


def test_what_a_launcher_does_with_seeds(tmp_path: Path) -> None:
    found = interpreted(kernel("dropout_gelu"), _CHILD, tmp_path)
    assert [what for what, held in found.items() if not held] == []
    assert len(found) == 9
