"""`torch.compile(model, backend="fusion_advisor")`, with kernels in Triton's interpreter."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.dynamo.measured import KernelRuns, Stopwatch, Tune, are_kept
from fusion_advisor.dynamo.options import alone, channels_last, options_of
from fusion_advisor.dynamo.partition import Occurrence
from fusion_advisor.dynamo.processes import Ranks
from fusion_advisor.dynamo.target import Target
from fusion_advisor.dynamo.weigh import InductorComparison, compare_with_inductor, may_win
from fusion_advisor.dynamo.whole_graph import GraphTimes, graph_times, timed_graph, why_untimed
from fusion_advisor.fusion.decide import decide
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.measure.protocol import Series, Turns

from .regions import RULES, flow_of
from .spawned import facts_by

ROOT = Path(__file__).resolve().parents[2]
Facts = dict[str, Any]


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Facts]:
    """What each scenario of `compiled_models` saw, all in one process of their own."""
    return facts_by("compiled_models.py", ROOT, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def long_scenarios() -> dict[str, Facts]:
    """What the others saw, which only the deep tests ask for."""
    return facts_by("compiled_models.py", ROOT, ["long"], PYTHONPATH=str(ROOT))


def facts_of(scenarios: dict[str, Facts], name: str) -> Facts:
    facts = scenarios[name]
    assert "error" in facts or "raised" not in facts, facts.get("raised")
    return facts


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "transformer",
        "transformer_in_bfloat16",
        "perceptron",
        "parts",
        "losses",
        "inference_mode",
        "inductor",
    ],
)
def test_results_are_eagers(scenarios: dict[str, Facts], name: str) -> None:
    _as_eager(facts_of(scenarios, name))


@pytest.mark.deep
def test_results_with_constants_are_eagers(long_scenarios: dict[str, Facts]) -> None:
    _as_eager(facts_of(long_scenarios, "constants"))


def _as_eager(facts: Facts) -> None:
    assert facts["error"] <= facts["allowed"]
    assert facts["same"]
    assert facts["taken"]
    assert not facts["left"]
    assert facts["breaks"] == {}


def test_every_fusion_of_a_transformer_is_taken(scenarios: dict[str, Facts]) -> None:
    taken = facts_of(scenarios, "transformer")["taken"]
    names = [re.sub(r"_\d+$", "", name) for name in taken]
    assert names == ["residual_rms_norm"] * 4 + ["rms_norm"] + ["swiglu"] * 2


def test_equal_computations_share_an_operator(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "operators_are_shared") == {"calls": 7, "operators": 4}


def test_casts_of_autocast_are_followed(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "autocast")
    assert facts["taken"]
    assert facts["dtype"]
    assert facts["off"] < 2**-5  # bfloat16, truncated by the interpreter


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "graphs"), [("sizes_found_dynamic", 2), ("sizes_said_dynamic", 1)]
)
def test_one_graph_serves_all_sizes(scenarios: dict[str, Facts], name: str, graphs: int) -> None:
    """Dynamo finds out at the second size that it changes."""
    facts = facts_of(scenarios, name)
    assert facts["graphs"] == graphs
    assert len(facts["taken"]) == 7
    assert facts["error"] <= facts["allowed"]
    assert facts["same"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("numbers_made_from_sizes", "div computes with s"),
        ("rows_made_from_sizes", "serves one size of arange alone, where the graph has 2*s"),
    ],
)
def test_what_a_kernel_would_fix_stays(scenarios: dict[str, Facts], name: str, why: str) -> None:
    facts = facts_of(scenarios, name)
    assert facts["left"][0].startswith(why)
    assert not facts["taken"]
    assert facts["graphs"] == 1
    assert facts["error"] <= facts["allowed"]


def test_a_number_of_the_callers_is_not_fixed(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "numbers_given_by_the_caller")
    assert facts["off"] == 0
    assert "computes with zf" in facts["left"][0]
    assert facts["graphs"] == 1


# -- what is left to others ------------------------------------------------------------------------


def test_a_model_that_takes_gradients_itself_gets_them(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "gradients_within")
    assert facts["error"] <= facts["allowed"]


def test_dropout_draws_from_torchs_generator(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "dropout")
    assert facts["left"][0].startswith("draws random numbers")
    assert 0.4 < facts["dropped"] < 0.6


def test_what_does_not_win_is_left(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "nothing_that_wins")
    assert not facts["taken"]
    assert len(facts["left"]) == 7
    assert facts["untouched"]


def test_without_a_gpu_the_graph_is_inductors(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "no_gpu")["why"].startswith("no input is on a CUDA device")


# -- state -----------------------------------------------------------------------------------------


def test_buffers_are_read_before_they_are_written(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "state_written_in_place")
    assert facts["taken"]
    assert facts["calls"] == 3
    assert facts["off"] < 1e-5


def test_a_result_stays_in_the_input_that_it_lies_in(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "result_in_a_written_input")
    whole, part = [3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 3.0]
    ones = [1.0, 1.0]
    assert facts["x"] == [whole + ones, ones + whole, part + ones, ones + part]
    assert facts["said"][0] == facts["said"][1] == []
    assert facts["taken"][0]
    (said,) = facts["said"][2]
    assert "it returns a part of an input which it writes" in said


# -- what is said ----------------------------------------------------------------------------------


def test_a_fault_costs_the_kernels_and_not_the_model(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "a_fault_of_ours")
    assert facts["equal"]
    assert "the analysis is out" in facts["strict"]
    (said,) = facts["said"]
    assert "RuntimeError: the analysis is out; Inductor compiles the graph alone" in said


@pytest.mark.deep
def test_a_view_may_be_a_copy_for_inductor(long_scenarios: dict[str, Facts]) -> None:
    facts = facts_of(long_scenarios, "views_of_what_inductor_lays_otherwise")
    assert facts["near"]
    assert facts["taken"]


def test_what_was_done_is_logged(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "logged")
    assert facts["level"] == "INFO"
    assert facts["text"].startswith(
        "1 of 1 fusions are ours\n  ours: g1 layer_norm_relu x1: kernel "
    )
    assert facts["kept"]


def test_a_wrong_option_is_told(scenarios: dict[str, Facts]) -> None:
    assert "inner='inductr': one of" in scenarios["a_wrong_option"]["raised"]


def test_the_entry_point_is_the_backend() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entry = project["entry-points"]["torch_dynamo_backends"]["fusion_advisor"]
    module, name = entry.split(":")
    assert callable(getattr(importlib.import_module(module), name))


# -- who wins --------------------------------------------------------------------------------------


def weighed(
    function: Any, *inputs: torch.Tensor, parts: slice = slice(None), **how: bool
) -> InductorComparison:
    """The first launches of a function as one kernel, against Inductor's."""
    flow = flow_of(function, *inputs)
    launches = [i for i in range(len(flow.nodes)) if flow.launches(i)]
    decision = decide(flow, launches[parts], RULES)
    return compare_with_inductor(decision, RULES, **{"tuned": False, "graphed": False, **how})


def by_hand(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_inductor_falls_behind_where_reductions_follow_each_other() -> None:
    """Measured: softmax of 4096 in bfloat16 at 96 % of copy and 57 %, in float32 at 96 and 99 %."""
    narrow = torch.empty(65536, 4096, dtype=torch.bfloat16, device="meta")
    assert weighed(by_hand, narrow).wins
    assert not weighed(by_hand, narrow.float()).wins


def test_rows_that_inductor_keeps_on_chip_are_as_fast() -> None:
    short = weighed(by_hand, torch.empty(262144, 1024, dtype=torch.bfloat16, device="meta"))
    long = weighed(by_hand, torch.empty(65536, 4096, dtype=torch.bfloat16, device="meta"))
    assert short.inductor_us / short.kernel_us < 1.05 < long.inductor_us / long.kernel_us


def test_reductions_over_other_axes_are_kernels_of_their_own_for_inductor() -> None:
    """Measured: three such sums with their norms, of 671 MB each, take ours some 500 us, and
    Inductor's two kernels less than 240."""

    def mixed(x: torch.Tensor) -> torch.Tensor:
        total = x.float().sum(1)
        return total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.empty(8192, 8, 4096, dtype=torch.bfloat16, device="meta")
    total, device = 8192 * 4096 * 4, RULES.device("h200")
    moved = x.numel() * 2 + total + total + total
    found = weighed(mixed, x)
    assert found.inductor_us <= 2 * device.times.launch.value + 1e6 * moved / device.bandwidth
    assert found.inductor_us > 1e6 * moved / device.bandwidth


def test_a_short_kernel_waits_for_the_host_but_in_a_graph() -> None:
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    assert weighed(by_hand, x).host_us > 0
    assert weighed(by_hand, x, graphed=True).host_us == 0


def test_what_inductor_would_have_fused_is_charged() -> None:
    """A gelu behind the kernel: its operand is written and read for it alone, by a launch more."""
    x = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")
    whole = weighed(lambda x: F.gelu(by_hand(x)), x)
    cut = weighed(lambda x: F.gelu(by_hand(x)), x, parts=slice(0, -1))
    assert (whole.blocked_bytes, whole.blocked_us) == (0, 0.0)
    assert cut.blocked_bytes == 2 * x.numel() * 2
    assert cut.blocked_us > 1e6 * cut.blocked_bytes / RULES.device("h200").bandwidth
    assert not cut.wins


@pytest.mark.parametrize("written", ["copied", "put"])
def test_what_goes_into_a_cache_is_computed_as_it_is_stored(written: str) -> None:
    """Inductor has one launch for both: a kernel's result is written and read for the second."""
    x = torch.empty(64, 4096, dtype=torch.bfloat16, device="meta")
    cache, places = x.new_empty(128, 4096), torch.empty(64, dtype=torch.int64, device="meta")

    def stored(x: torch.Tensor, cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        y = by_hand(x)
        if written == "copied":
            return cache.index_copy(0, places, y)
        return cache.index_put([places], y)

    kernel = weighed(stored, x, cache, places, parts=slice(0, -1))
    assert kernel.blocked_bytes == 2 * x.numel() * 2


def test_copies_into_another_layout_are_charged() -> None:
    """Inductor has the channels of convolutions last in memory; our kernel was planned for another
    layout of what one makes and what one reads."""
    x = torch.empty(16, 128, 56, 56, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(128, 128, 1, 1, dtype=torch.bfloat16, device="meta")

    def normed(x: torch.Tensor) -> torch.Tensor:
        return by_hand(F.conv2d(x, weight)) * 2.0

    def chain(x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(normed(x), weight)

    def last(x: torch.Tensor) -> torch.Tensor:
        return normed(x) @ x.new_empty(56, 56)

    launches, size = slice(1, -1), x.numel() * 2
    for function, copies in ((chain, 2), (last, 1)):
        known = weighed(function, x, parts=launches)
        laid_out = weighed(function, x, parts=launches, channels_last=True)
        assert laid_out.blocked_bytes - known.blocked_bytes == copies * 2 * size
        assert laid_out.blocked_us > known.blocked_us


@pytest.mark.parametrize(("size", "last"), [(64, True), (1, True), (0, False)])
def test_whether_channels_are_last_is_inductors_to_say(size: int, last: bool) -> None:
    def graph(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(F.conv2d(x, weight)) if size else torch.relu(x)

    x = torch.empty(4, 128, 8 * size or 8, 8, device="meta")
    module = make_fx(graph)(x, torch.empty(128, 128, 3, 3, device="meta"))
    assert channels_last(module, {}, training=False) is last
    assert not channels_last(module, {"layout_optimization": False}, training=False)
    assert not channels_last(module, None, training=True)


def test_what_reads_the_same_tensor_beside_a_kernel_is_charged() -> None:
    """Inductor has one launch for both, and reads the tensor once; not where one waits for the
    other, or has another size."""
    x, y = (torch.empty(64, 4096, dtype=torch.bfloat16, device="meta") for _ in range(2))
    square = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    first = slice(0, 5)

    def beside(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return by_hand(x), torch.sigmoid(x * y)

    def waiting(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(by_hand(x) @ w * x)

    def smaller(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return by_hand(x), x[:8] * y[:8]

    kernel = weighed(beside, x, y, parts=first)
    assert kernel.blocked_bytes == x.numel() * 2
    assert kernel.blocked_us > 1e6 * kernel.blocked_bytes / RULES.device("h200").bandwidth
    assert weighed(waiting, x, square, parts=first).blocked_bytes == 0
    assert weighed(smaller, x, y, parts=first).blocked_bytes == 0


def turned(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return x * angle.cos() + torch.cat((-x[..., 64:], x[..., :64]), -1) * angle.sin()


@pytest.mark.parametrize(
    ("function", "rows", "graphed", "may"),
    [
        (turned, 64, True, False),
        (turned, 65536, True, True),
        (turned, 65536, False, True),
        (turned, 8192, True, True),
        (turned, 8192, False, False),  # the host takes longer than the kernel
        (lambda x, angle: by_hand(turned(x, angle)), 64, True, True),
    ],
)
def test_streams_of_few_bytes_cannot_win(
    function: Callable[..., torch.Tensor], rows: int, graphed: bool, may: bool
) -> None:
    """What Inductor's stream takes longer is a share of its bytes; rows wait for more than that."""
    x, angle = (torch.empty(rows, 128, dtype=torch.bfloat16, device="meta") for _ in range(2))
    flow = flow_of(function, x, angle)
    launches = [i for i in range(len(flow.nodes)) if flow.launches(i)]
    assert may_win(flow, RULES, launches, tuned=False, graphed=graphed) is may


def test_what_waits_for_a_matmul_is_no_neighbour() -> None:
    """The residual is read again behind the block, where no kernel could reach."""

    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = by_hand(x)
        return y + y @ w

    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    launches = slice(0, 5)
    assert weighed(block, x, torch.empty_like(x), parts=launches).blocked_bytes == 0


def test_regions_are_timed_beside_inductor_alone() -> None:
    """A backend function of the user's is called for the user's graphs and no others."""

    def beside(mode: str | None) -> str:
        patches = options_of(mode, {}).patches
        assert patches is not None
        return alone(patches)[1]

    seen = {beside(None), beside("max-autotune-no-cudagraphs")}
    assert len(seen | {""}) == 3
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        assert beside(None) not in seen
    for inner in ("eager", lambda module, inputs: module.forward):
        assert options_of(None, {"inner": inner}).patches is None


def test_the_names_of_our_options_stay() -> None:
    """What is not ours goes to Inductor, which refuses what it does not know."""
    given = {"inner": "eager", "take_all": True, "device": "h200", "rules": (), "tune": "off"}
    asked = dict(given)
    chosen = options_of(None, asked)
    assert asked == {}, "each of them is ours"
    assert (chosen.device, chosen.compiler.take_all) == ("h200", True)


# -- the stopwatch ---------------------------------------------------------------------------------


@dataclass
class Told:
    """Runs on no GPU: times that the test gives for each kernel, or why it does not run."""

    us: Callable[[Kernel], float | str]
    right: bool = True
    inductor_us: float | str = "not asked for"
    asked: int = 0

    def prepare(self, tensors: Sequence[Tensor]) -> KernelRuns:
        return self

    def timed(self, kernels: Sequence[Kernel], rounds: int) -> Turns:
        self.asked += 1
        found = map(self.us, kernels)
        series = (Series(failure=us) if isinstance(us, str) else Series((us,)) for us in found)
        return Turns(tuple(series), (("gpu", "G"), ("torch", "T"), ("triton", "t")))

    def proven(self, kernel: Kernel, own: Kernel) -> Check:
        return Check(kernel.name, "here", passed=self.right)

    def beside(self, kernel: Kernel, own: Kernel, rounds: int) -> Turns:
        mine, theirs = self.timed([kernel], rounds), self.inductor_us
        other = Series(failure=theirs) if isinstance(theirs, str) else Series((theirs,))
        return replace(mine, series=(*mine.series, other))


def watched(
    told: Told,
    worth_us: float = float("inf"),
    tune: Tune = "off",
    predicted_us: float = 10.0,
    group: Ranks | None = None,
) -> tuple[Occurrence, Kernel]:
    """First of two places of one kernel after the stopwatch, and the kernel by the rules."""
    flow = flow_of(by_hand, torch.empty(4096, 4096, device="meta"))
    decision = decide(flow, [i for i in range(len(flow.nodes)) if flow.launches(i)], RULES)
    kernel = attempt(flow, decision, "chain", RULES)
    assert isinstance(kernel, Kernel)
    weighed = InductorComparison(worth_us, predicted_us, 0.0, 0, 0, 0, call_us=0.0)
    beside = weighed if worth_us < float("inf") else None
    place = Occurrence("g1", "chain", "because", decision, kernel, weighed=beside)
    watch = Stopwatch(RULES, tune, "G", told.prepare, "Inductor", group)
    found = watch.places(flow, [place, place])
    assert found[0] == found[1]
    return found[0], kernel


def test_a_kernel_that_takes_longer_than_it_was_worth_is_left() -> None:
    def said(worth_us: float, us: float | str) -> tuple[str, bool, int]:
        told = Told(lambda kernel: us)
        place, kernel = watched(told, worth_us)
        return place.why, place.kernel == kernel, told.asked

    slow = "takes 1774 us on this GPU, where it was worth 650 us"
    assert said(650.0, 1774.0) == (slow, False, 1)
    assert said(650.0, 700.0) == ("because", True, 1), "within what is tolerated"
    assert said(20.0, 100.0) == ("because", True, 0), "too short to be timed"
    assert said(float("inf"), 100.0) == ("because", True, 0), "it need not win"
    assert said(650.0, "no memory") == ("does not run on this GPU: no memory", False, 1)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FUSION_ADVISOR_CACHE", str(tmp_path))
    return tmp_path / "tuned"


def test_the_fastest_configuration_is_placed_and_kept(own_cache: Path) -> None:
    """The rules' own is the slowest here, and the last of those that are offered the fastest."""
    mine = watched(Told(lambda kernel: 1.0))[1]
    times = {mine.text: 90.0}

    def us(kernel: Kernel) -> float:
        return times.setdefault(kernel.text, 80.0 - len(times))

    place, own = watched(Told(us), tune="now")
    subject = place.decision.subject
    assert place.kernel is not None
    assert place.kernel.text == min(times, key=times.__getitem__) != own.text
    assert place.why.startswith("because; tuned: ")
    assert subject.plan != decide(subject.flow, subject.launches, RULES).subject.plan
    assert 3 < len(times) <= 1 + RULES.tuning.offered.count
    assert len(list(own_cache.iterdir())) == 1

    later = Told(us)
    again, _ = watched(later, tune="cached")
    assert (again.kernel, later.asked) == (place.kernel, 0)
    assert "tuned by an earlier run: " in again.why
    slow, _ = watched(Told(lambda kernel: 1774.0), 650.0, tune="cached")
    assert (slow.kernel, slow.why[:13]) == (None, "takes 1774 us"), "it has to win here, too"
    assert watched(Told(us), tune="off")[0].kernel == own


def test_a_kernel_has_to_win_over_inductors_where_both_are_timed(own_cache: Path) -> None:
    """What is predicted decides what is tried, and no more; what was seen is kept."""

    def placed(
        us: float, inductor_us: float | str, predicted_us: float, tune: Tune = "now"
    ) -> tuple[bool, str]:
        told = Told(lambda kernel: us, inductor_us=inductor_us)
        place, _ = watched(told, 100.0, tune, predicted_us)
        return place.kernel is not None, place.why

    assert placed(80.0, 90.0, 120.0, "cached") == (False, "because"), "nothing is known yet"
    assert not are_kept()
    assert placed(80.0, 90.0, 120.0) == (True, "kernel 80.0 us, Inductor 90.0 us (timed here)")
    assert placed(1.0, 1.0, 120.0, "cached")[0], "the times that were kept"
    assert are_kept()
    assert not placed(80.0, 90.0, 120.0, "off")[0]
    for kept in own_cache.iterdir():
        kept.unlink()
    seen = "kernel 80.0 us, Inductor 70.0 us (timed here)"
    assert placed(80.0, 70.0, 60.0) == (False, seen)
    assert placed(1.0, 99.0, 60.0, "cached") == (False, seen)
    for kept in own_cache.iterdir():
        kept.unlink()
    assert placed(80.0, 79.5, 60.0) == (True, "because"), "too near: by prediction"
    for kept in own_cache.iterdir():
        kept.unlink()
    assert placed(80.0, "does not compile", 60.0) == (True, "because"), "by prediction"
    assert placed(80.0, "does not compile", 120.0) == (False, "because")


def test_no_configuration_is_taken_that_is_wrong_or_hardly_faster(own_cache: Path) -> None:
    mine = watched(Told(lambda kernel: 1.0))[1]
    for others, right in ((50.0, False), (89.0, True), ("no shared memory", True)):
        told = Told(lambda kernel, us=others: 90.0 if kernel == mine else us, right=right)
        assert watched(told, tune="now")[0].kernel == mine
        asked = Told(lambda kernel: 1.0)
        assert watched(asked, tune="cached")[0].kernel == mine
        assert [file.unlink() for file in own_cache.iterdir()] == [None], "it is kept, too"


def test_a_kernel_that_cannot_run_is_left_when_it_is_tuned(own_cache: Path) -> None:
    place, _ = watched(Told(lambda kernel: "no memory"), tune="now")
    assert (place.kernel, place.why) == (None, "does not run on this GPU: no memory")
    assert not own_cache.exists()


# -- a group of processes --------------------------------------------------------------------------


def group_of(count: int, waited_s: float = 5.0) -> list[Ranks]:
    store = torch.distributed.HashStore()
    return [Ranks(rank, store, waited_s) for rank in range(count)]


def test_rank_0_chooses_for_all(own_cache: Path) -> None:
    """The others time nothing, and keep nothing: what they place is what rank 0 places."""
    first, second = group_of(2)
    times: dict[str, float] = {}

    def us(kernel: Kernel) -> float:
        return times.setdefault(kernel.text, 80.0 - len(times))

    mine, own = watched(Told(us, inductor_us=90.0), 100.0, "now", group=first)
    assert mine.kernel not in (None, own)
    kept = [*own_cache.iterdir()]
    idle = Told(lambda kernel: 1.0)
    theirs, _ = watched(idle, 100.0, "now", group=second)
    assert (theirs.kernel, theirs.why) == (mine.kernel, mine.why)
    assert (idle.asked, [*own_cache.iterdir()]) == (0, kept)

    kept[0].unlink()
    first, second = group_of(2)
    slow = watched(Told(us, inductor_us=10.0), 200.0, "now", group=first)[0]
    assert slow.kernel is None
    assert watched(idle, 200.0, "now", group=second)[0] == slow


def test_who_hears_nothing_of_rank_0_goes_by_the_rules() -> None:
    _, second = group_of(2, waited_s=0.01)
    with pytest.warns(UserWarning, match="rank 0 chose no kernels for rank 1 in 0 s"):
        place, own = watched(Told(lambda kernel: 1.0), tune="now", group=second)
    assert (place.kernel, place.why) == (own, "because")
    assert watched(Told(lambda kernel: 1.0), tune="now", group=second)[0] == place, (
        "no more waiting"
    )


# -- a whole graph ---------------------------------------------------------------------------------


def test_a_graph_has_to_be_faster_with_kernels_by_more_than_rounds_differ() -> None:
    def left(ours_us: float, spread_us: float = 0.0) -> bool:
        return GraphTimes(ours_us, 1000.0, spread_us).loses(RULES)

    assert [left(us) for us in (980.0, 989.0, 991.0, 1100.0)] == [False, False, True, True]
    assert [left(1000.0, spread) for spread in (9.0, 11.0)] == [True, False]


def test_times_of_a_graph_are_kept_and_told(own_cache: Path) -> None:
    """Without `now` nothing is timed; what could not be timed is not kept."""
    asked = {"graph": "a"}
    calls: list[int] = []

    def found(tune: Tune, times: GraphTimes | None, group: Ranks | None = None) -> Any:
        def timed() -> GraphTimes | None:
            calls.append(1)
            return times

        return graph_times(asked, tune, group, RULES, timed)

    one, other = GraphTimes(90.0, 100.0, 1.0), GraphTimes(1.0, 2.0, 3.0)
    assert [found("cached", one), found("off", one), found("now", None)] == [None] * 3
    assert (len(calls), own_cache.exists()) == (1, False)
    assert [found("now", one), found("now", other), found("cached", other)] == [one] * 3
    assert len(calls) == 2
    first, second = group_of(2)
    assert [found("now", None, first), found("now", None, second)] == [one, one]


def test_a_graph_that_does_not_compile_keeps_what_was_predicted() -> None:
    def both() -> Any:
        raise RuntimeError("no code for that")

    here, device = torch.device("cpu"), RULES.device("h200")
    with pytest.warns(UserWarning, match="the graph is not timed: RuntimeError: no code for that"):
        found = timed_graph(both, (), RULES, device, here)
    assert found is None


def untimed(function: Callable[..., object], *inputs: torch.Tensor) -> str:
    return why_untimed(make_fx(function, tracing_mode="fake")(*inputs).graph)


def test_a_graph_is_timed_only_where_any_operands_will_do() -> None:
    """What stops a GPU ends the process: an index out of range, a probability above one; and a
    collective call waits for others."""
    words, floats, places = torch.ones(50, 8), torch.rand(4, 6), torch.zeros(4, dtype=torch.int64)
    embedded: Callable[..., object] = F.embedding
    assert untimed(lambda t, w: embedded(t.view(2, 2), w), places, words) == ""
    assert untimed(lambda t, w: embedded(torch.arange(3) + 2, w) * t.sum(), places, words) == ""
    assert untimed(lambda x, w: embedded(x.argmax(-1), w), floats, words) == ""
    assert untimed(lambda x, w: embedded(x.topk(2)[1], w), floats, words) == ""
    assert untimed(lambda x: x[x > 0.5], floats) == ""
    computed = "is indexed by what the graph computes"
    assert computed in untimed(lambda t, w: embedded(t - 1, w), places, words)
    assert computed in untimed(lambda x, w: embedded((x * 7).long(), w), floats, words)
    assert computed in untimed(lambda x, t: x.gather(1, (t + 3)[:, None]), floats, places)
    assert computed in untimed(lambda x, t: F.nll_loss(x, t * 2), floats, places)
    assert "aten.multinomial" in untimed(lambda x: torch.multinomial(x, 1), floats)
    assert "aten.bernoulli" in untimed(torch.bernoulli, floats)
    graph = torch.fx.Graph()
    graph.call_function(torch.ops.mkldnn._linear_pointwise.default)
    assert why_untimed(graph) == "it is not known what mkldnn._linear_pointwise.default does"


@pytest.mark.parametrize("now", [True, False], ids=["timed now", "as kept"])
@pytest.mark.parametrize(("us", "stay"), [(90.0, True), (110.0, False)])
def test_kernels_that_make_the_graph_slower_are_left(
    us: float, stay: bool, now: bool, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wins for itself; the graph runs as it is told of, and is compiled once more only where
    it was not compiled to be timed."""
    backend = importlib.import_module("fusion_advisor.dynamo.backend")
    graphs: list[str] = []
    run: list[str] = []

    def inner(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module.code)

        def called(*given: Any) -> Any:  # not worth a run in the interpreter
            run.append(module.code)
            return given

        return called

    def timed(compiled: Callable[[], Any], *given: Any) -> GraphTimes:
        if now:
            compiled()
        return GraphTimes(us, 100.0, 0.0)

    here = torch.device("cpu")
    target = Target(RULES, RULES.device("h200"), "", "G", here, inner, "Inductor", None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "target_of", lambda *given, **how: target)
    monkeypatch.setattr(backend, "on_gpu", lambda *given, **how: None)
    monkeypatch.setattr(backend, "timed_graph", timed)
    outcomes: list[Any] = []
    options = {"inner": inner, "take_all": False, "tune": "now"}

    def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return backend.fusion_advisor(module, inputs, options=options, on_outcome=outcomes.append)

    with torch.no_grad():
        torch.compile(by_hand, backend=compiler)(torch.ones(4096, 4096, dtype=torch.bfloat16))
    (outcome,) = outcomes
    assert bool(outcome.taken) == stay
    assert len(graphs) == (2 if now else 1)
    assert ["fusion_advisor" in code for code in run] == [stay]
    said = {place.why for place in outcome.left}
    slow = "the graph takes 110.0 us with kernels of ours and 100.0 us without (timed here)"
    assert said == (set() if stay else {slow})


# -- rewrites --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["whole", "holes"])
def test_a_graph_for_padding_and_one_without(scenarios: dict[str, Facts], first: str) -> None:
    facts = facts_of(scenarios, "padding")[first]
    assert facts["near"]
    assert facts["counts"] == [1, 2, 2]
    assert facts["rewritten"] == ([1, 0] if first == "whole" else [0, 1])
    assert facts["taken"] == ([1, 2] if first == "whole" else [2, 1])  # the norm; the mask
    assert facts["stay"] == [3, 3]  # the weights, which a CUDA graph does not copy


@pytest.mark.parametrize("first", ["whole", "holes"])
def test_the_graph_without_padding_has_a_part_before_its_attention(
    scenarios: dict[str, Facts], first: str
) -> None:
    """The norm is in the part before, and no rewrite; the graph for padding is whole."""
    facts = facts_of(scenarios, "padding_asked_within")[first]
    assert facts["near"]
    assert facts["counts"] == ([2, 3, 3] if first == "whole" else [1, 3, 3])
    assert facts["rewritten"] == ([0, 1, 0] if first == "whole" else [0, 0, 1])
    assert facts["taken"] == ([1, 0, 2] if first == "whole" else [2, 1, 0])
    assert facts["stay"][:2] == [3, 3]
