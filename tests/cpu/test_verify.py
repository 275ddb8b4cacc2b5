"""The checker: what it accepts, and that each of its faults is caught and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Check, CheckJob, Kernel
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.shipped.load import load_module, process_folder
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.worker import Worker, WorkerError
from fusion_advisor.verify.check_child import Run
from fusion_advisor.verify.driver import checker, criterion_of
from fusion_advisor.verify.inputs import DISTRIBUTIONS
from fusion_advisor.verify.references import truth

from .checks import CRITERION, checked
from .regions import kernel_of
from .sample_kernels import SAMPLES, layer_norm, softmax, swiglu


def failure(worker: Worker, kernel: Kernel, seeds: int = 5) -> str:
    """The failure of a kernel that must not pass."""
    (check,) = checked(worker, kernel, seeds=seeds)
    assert not check.passed
    assert check.failure is not None
    assert "\n" not in check.failure
    return check.failure


def changed(kernel: Kernel, old: str, new: str) -> Kernel:
    assert old in kernel.text
    return replace(kernel, text=kernel.text.replace(old, new))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.__name__)
def test_right_kernels_pass(worker: Worker, sample: object) -> None:
    assert callable(sample)
    (check,) = checked(worker, sample(), seeds=10)
    assert check.failure is None
    assert check.passed
    assert check.where == "interpreter"
    assert check.max_error <= check.tolerance
    assert len(check.shapes) >= 3
    assert check.seeds == 10


def test_records_survive_the_pipe() -> None:
    job = CheckJob(softmax(), 3, criterion_of(load_rulebook().verify))
    assert from_json(CheckJob, to_json(job)) == job
    check = Check("k", "interpreter", False, ("a",), 3, float("inf"), 0.0, 1.5, "no")
    assert from_json(Check, to_json(check)) == check


def test_traffic_is_compared_to_the_byte(worker: Worker) -> None:
    kernel = softmax()
    case = kernel.cases[0]
    assert case.loaded_bytes is not None
    wrong = replace(case, loaded_bytes=case.loaded_bytes + 4)
    message = failure(worker, replace(kernel, cases=(wrong,)))
    assert f"loaded {case.loaded_bytes} bytes, the plan says {wrong.loaded_bytes}" in message


def test_out_of_bounds_is_a_failure_not_a_crash(worker: Worker) -> None:
    kernel = changed(swiglu(), "a_ptr + row", "a_ptr + 1000000000 + row")
    assert "load out of bounds" in failure(worker, kernel)
    assert checked(worker, swiglu())[0].passed


def test_missing_store_shows_the_poison(worker: Worker) -> None:
    kernel = changed(softmax(), "y, mask=inside)", "y, mask=inside & (col != 3))")
    message = failure(worker, kernel)
    assert "output 0[0, 3]: ours nan" in message


def test_two_values_at_one_address_are_a_race(worker: Worker) -> None:
    kernel = changed(softmax(), "* y_stride + col, y", "* 0 + col, y")
    assert "race" in failure(worker, kernel)


def test_programs_may_not_read_each_other(worker: Worker) -> None:
    kernel = changed(
        softmax(),
        "tl.store(",
        "x += tl.load(y_ptr + col, mask=(row > 1) & (col < columns), other=0.0)\n    tl.store(",
    )
    assert "race: a program loads what another program stored" in failure(worker, kernel)


def test_inputs_must_stay_as_they_were(worker: Worker) -> None:
    kernel = changed(
        softmax(), "    tl.store(", "    tl.store(x_ptr + row * x_stride + col, x + 1.0, "
        "mask=inside)\n    tl.store("
    )  # fmt: skip
    assert "input 0 was changed" in failure(worker, kernel)


def test_wrong_eps_shows_in_small_rows(worker: Worker) -> None:
    assert "error" in failure(worker, changed(layer_norm(), "v + 1e-05", "v + 1.1e-05"))


def test_dropped_nan_is_caught(worker: Worker) -> None:
    clamp = """
import torch, triton, triton.language as tl
@triton.jit
def relu_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, tl.maximum(x, 0.0), mask=i < n)
def relu(x):
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    relu_kernel[(1,)](x, y, x.numel(), 128)
    return y
def reference(x):
    return torch.ops.aten.relu.default(x)
"""
    case = Case("n", (Tensor((100,), (1,), "float32"),), 400, 400)
    kernel = Kernel("relu", "relu", clamp, ("x",), ("float32",), (case,))
    assert "expected nan" in failure(worker, kernel)
    whole = changed(kernel, "tl.maximum(x, 0.0)", "tl.maximum(x, 0.0, tl.PropagateNan.ALL)")
    assert checked(worker, whole)[0].failure is None


def test_a_clamp_drops_nan_as_the_hardware_does(worker: Worker) -> None:
    """Emitted logistic functions rely on it. Programs walk rows by numbers that are tensors."""
    clamp = """
import torch, triton, triton.language as tl
@triton.jit
def clamp_kernel(x_ptr, y_ptr, rows, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * n + i, mask=i < n)
        y = tl.clamp(tl.where(x != x, x, x * 0.0), -1.0, 1.0)
        tl.store(y_ptr + row * n + i, y, mask=i < n)
def clamp(x):
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    clamp_kernel[(2,)](x, y, *x.shape, 128)
    return y
def reference(x):
    zero = torch.ops.aten.zeros_like.default(x)
    return torch.ops.aten.where.ScalarOther(torch.ops.aten.ne.Tensor(x, x), zero - 1.0, 0.0)
"""
    case = Case("n", (Tensor((5, 100), (100, 1), "float32"),), 2000, 2000)
    kernel = Kernel("clamp", "clamp", clamp, ("x",), ("float32",), (case,))
    wrong = "x * 0.0), -1.0, 1.0, tl.PropagateNan.ALL)"
    assert "expected -1" in failure(worker, changed(kernel, "x * 0.0), -1.0, 1.0)", wrong))
    (check,) = checked(worker, changed(kernel, "x * 0.0", "0.0"))
    assert check.failure is None


def test_bf16_stores_round_to_nearest_even(worker: Worker) -> None:
    copy = """
import torch, triton, triton.language as tl
@triton.jit
def cast_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x, mask=i < n)
    tl.store(z_ptr + i, x.to(tl.bfloat16).to(tl.float32) == x, mask=i < n)
def cast(x):
    y = torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device=x.device)
    z = torch.empty_strided(x.shape, x.stride(), dtype=torch.bool, device=x.device)
    cast_kernel[(1,)](x, y, z, x.numel(), 1024)
    if x.isfinite().all():
        assert torch.equal(y, x.to(torch.bfloat16))
    return y, z
def reference(x):
    y = torch.ops.aten._to_copy.default(x, dtype=torch.bfloat16)
    return y, torch.ops.aten.eq.Tensor(torch.ops.aten._to_copy.default(y, dtype=torch.float32), x)
"""
    case = Case("n", (Tensor((1000,), (1,), "float32"),), 4000, 3000)
    kernel = Kernel("cast", "cast", copy, ("x",), ("bfloat16", "bool"), (case,))
    (check,) = checked(worker, kernel)
    assert check.failure is None


def test_reductions_run_the_real_combine_function(worker: Worker) -> None:
    text = """
import torch, triton, triton.language as tl
@triton.jit
def later(v, i, w, j):
    take = (w > v) | ((w == v) & (j < i)) | ((w != w) & ((v == v) | (j < i)))
    take = take & ((v == v) | (w != w))
    return tl.where(take, w, v), tl.where(take, j, i)
@triton.jit
def argmax_kernel(x_ptr, v_ptr, i_ptr, rows, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)[None, :]
    x = tl.load(x_ptr + row * n + col, mask=col < n, other=float("-inf"))
    v, i = tl.reduce((x, tl.broadcast_to(col, x.shape)), 1, later, keep_dims=True)
    tl.store(v_ptr + row + tl.zeros((1, 1), tl.int32), v)
    tl.store(i_ptr + row + tl.zeros((1, 1), tl.int32), i.to(tl.int64))
def argmax(x):
    v = torch.empty_strided((x.shape[0], 1), (1, 1), dtype=x.dtype, device=x.device)
    i = torch.empty_strided((x.shape[0], 1), (1, 1), dtype=torch.int64, device=x.device)
    argmax_kernel[(x.shape[0],)](x, v, i, x.shape[0], x.shape[1], 256)
    return v, i
def reference(x):
    return torch.ops.aten.max.dim(x, 1, True)
"""
    case = Case("7x200", (Tensor((7, 200), (200, 1), "float32"),), 5600, 7 * 12)
    kernel = Kernel("argmax", "argmax", text, ("x",), ("float32", "int64"), (case,))
    (check,) = checked(worker, kernel, seeds=10)
    assert check.failure is None
    assert "output 1" in failure(worker, changed(kernel, "i.to(tl.int64)", "(i + 1).to(tl.int64)"))


def test_unserved_inputs_are_an_error_under_strict(worker: Worker) -> None:
    kernel = softmax()
    double = Case("fp64", (Tensor((3, 40), (40, 1), "float64"),))
    assert "does not serve" in failure(worker, replace(kernel, cases=(double,)))


def test_wrong_structure_dtype_and_strides(worker: Worker) -> None:
    kernel = softmax()
    assert "2 outputs" in failure(worker, changed(kernel, "return y\n", "return y, y\n"))
    assert "dtype" in failure(worker, changed(kernel, "return y\n", "return y.double()\n"))
    assert "output 0 has strides (1, 5), the graph says (37, 1)" in failure(
        worker, changed(kernel, "return y\n", "return y.t().contiguous().t()\n")
    )


def test_results_lie_as_cuda_lays_them_out(worker: Worker) -> None:
    """A CPU's batch norm gives a permuted tensor back in one piece; what CUDA leaves as it was is
    viewed there."""

    def function(
        x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        y = torch.batch_norm(x.transpose(1, 2), None, None, mean, var, False, 0.1, 1e-5, False)
        return y, y.transpose(1, 2).reshape(-1, 2, 4).softmax(-1)

    inputs = torch.randn(3, 5, 8), torch.randn(8), torch.rand(8)
    kernel = kernel_of(function, *inputs)
    assert ".reshape(" in kernel.text
    (check,) = checked(worker, kernel)
    assert check.failure is None


def test_numbers_at_which_eager_overflows_are_drawn_smaller(worker: Worker) -> None:
    """The product of two large float16 numbers is infinite in eager, and a norm of it NaN: its
    error says nothing. A kernel that keeps such a product wider rounds as often as eager does, and
    a wrong one is seen at numbers that both can hold."""

    def function(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = (x * y).float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        normal = (wide * scale).to(torch.float16) * weight
        return normal / normal.abs().amax(-1, keepdim=True)

    half = torch.float16
    kernel = kernel_of(
        function, torch.randn(7, 130, dtype=half), torch.randn(7, 1, dtype=half),
        torch.randn(130, dtype=half),
    )  # fmt: skip
    (check,) = checked(worker, kernel, seeds=6)
    assert check.failure is None
    module = load_module(kernel.text, process_folder())
    run = Run(DISTRIBUTIONS.index("large"), "cpu", CRITERION)
    smaller = run.in_range(module.reference, kernel.cases)
    assert 1 / 256 < smaller.scale < 1
    large, drawn = run.inputs(kernel.cases[0]), smaller.inputs(kernel.cases[0])
    assert not torch.isfinite(module.reference(*large)).any()
    assert torch.isfinite(module.reference(*drawn)).all()
    assert replace(run, seed=0).in_range(module.reference, kernel.cases).scale == 1


def test_labels_that_are_only_compared_are_classes(worker: Worker) -> None:
    """The gradient of a loss by labels loads nothing by them, and eager refuses a label that is no
    class: -7, or 40 of 33 at another size."""

    def function(shares: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        chosen = torch.ops.aten.nll_loss_backward(
            torch.ones_like(total), shares, labels, None, 1, -100, total
        )
        return torch.ops.aten._log_softmax_backward_data(chosen, shares, 1, torch.float32) * 15.0

    kernel = kernel_of(
        function, torch.randn(64, 66).log_softmax(1), torch.randint(0, 66, (64,)), torch.ones(())
    )
    assert "False &" not in kernel.text
    for case in kernel.cases:
        (shares,) = (tensor for tensor in case.inputs if len(tensor.shape) == 2)
        (limits,) = (limits for limits in case.ranges if limits)
        assert limits == (0, shares.shape[1])
    (check,) = checked(worker, kernel, seeds=6)
    assert check.failure is None


def test_the_gradient_of_a_loss_under_autocast(worker: Worker) -> None:
    """Autocast gives the loss a float32 copy of the scores, which its gradient does not read: the
    copy has the labels' rows. A zero that is rounded to bfloat16 is a zero, and no call of one."""

    def function(shares: torch.Tensor, labels: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        chosen = torch.ops.aten.nll_loss_backward(
            torch.ones_like(total), shares.float(), labels, None, 1, -100, total
        )
        narrow = chosen.bfloat16()
        return torch.ops.aten._log_softmax_backward_data(narrow, shares, 1, torch.bfloat16)

    shares = torch.randn(64, 66).log_softmax(1).bfloat16()
    kernel = kernel_of(function, shares, torch.randint(0, 66, (64,)), torch.ones(()))
    assert "0.0.to(" not in kernel.text
    assert "(64," not in kernel.text.split("\nSMALL")[0], "no size is asked for"
    (check,) = checked(worker, kernel, seeds=6)
    assert check.failure is None


def test_gradients_of_softmax_are_held_to_what_cuda_computes(worker: Worker) -> None:
    """A CPU's formula takes the sum off before it multiplies: at an infinite share it has infinity
    where CUDA has NaN."""

    def function(grad: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad.exp(), shares, 1, torch.float32)

    kernel = kernel_of(function, torch.randn(64, 2), torch.rand(64, 2))
    (check,) = checked(worker, kernel, seeds=6)
    assert check.failure is None
    cpus = kernel.text.replace(
        "function_part - args_1 * function_sum", "(exp - function_sum) * args_1"
    )
    assert cpus != kernel.text
    (check,) = checked(worker, replace(kernel, text=cpus), seeds=6)
    assert "expected nan" in (check.failure or "")


@pytest.mark.parametrize("end", ["last", "first"])
def test_the_end_of_a_scan_is_the_scans_own_element(worker: Worker, end: str) -> None:
    """A sum of the same values has another order: of large numbers the exponential of the
    difference at the end was 0.9, where eager has 1."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if end == "last":
            total = x.cumsum(-1)
            return (total[..., -1:] - total).exp(), total
        total = x.flip(-1).cumsum(-1).flip(-1)
        return (total[..., :1] - total).exp(), total

    (check,) = checked(worker, kernel_of(function, torch.randn(64, 3, 48)), seeds=6)
    assert check.failure is None


def test_the_end_of_a_scan_that_nothing_else_reads_is_a_reduction() -> None:
    kernel = kernel_of(lambda x: x.cumsum(-1)[..., -1].exp(), torch.randn(64, 48))
    assert "tl.cumsum" not in kernel.text
    assert "tl.sum" in kernel.text


def test_a_mean_of_infinities_is_no_number_in_the_reference() -> None:
    """CUDA's threads meet in an order of their own, and keep infinity or NaN; a kernel has NaN."""
    x = torch.ones(2, 8)
    x[0, -1] = torch.inf
    x[1] = torch.arange(8.0)
    known = truth(lambda x: torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5), (x,))
    assert known.exact[1].isnan().flatten().tolist() == [True, False]
    assert torch.equal(known.exact[1][1].float(), torch.tensor([3.5]))


def test_scans_are_held_to_what_cuda_rounds(worker: Worker) -> None:
    """A CPU's eager scans float32 in float64: here its error is a tenth of what any kernel has."""

    def function(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        decay = torch.nn.functional.logsigmoid(a).cumsum(1)
        return (x * torch.exp(-decay)).cumsum(1) * torch.exp(decay)

    (check,) = checked(
        worker, kernel_of(function, torch.randn(8, 512, 256), torch.randn(8, 512, 256))
    )
    assert check.failure is None


@pytest.mark.parametrize("shape", [(5, 700), (6, 40, 24), (400, 20000)], ids=str)
def test_logarithms_of_sums_are_scanned(worker: Worker, shape: tuple[int, ...]) -> None:
    """In a row, across rows and in chunks of a long one; infinities and NaN as eager has them."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x.logcumsumexp(1)) - x

    kernel = kernel_of(function, torch.randn(shape))
    assert "log_add_exp" in kernel.text
    (check,) = checked(worker, kernel)
    assert check.failure is None


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_a_softmax_that_widens_half_precision_needs_no_gpu(worker: Worker, name: str) -> None:
    """A CPU's eager has no kernel for it, CUDA's widens first."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return getattr(torch.nn.functional, name)(x * 0.5, -1, dtype=torch.float32)

    kernel = kernel_of(function, torch.randn(64, 200, dtype=torch.float16))
    assert kernel.outputs == ("float32",)
    assert f"_{name}.default" in kernel.text
    (check,) = checked(worker, kernel)
    assert check.failure is None


def test_a_broken_file_is_named(worker: Worker) -> None:
    kernel = softmax()
    assert "does not import" in failure(worker, replace(kernel, text="import nowhere\n"))
    assert "no cases" in failure(worker, replace(kernel, cases=()))


def test_a_crash_and_a_hang_cost_one_kernel(worker: Worker) -> None:
    kernel = softmax()
    crash = replace(kernel, text="import os\nos._exit(7)\n")
    hang = replace(kernel, text="while True: pass\n")
    crashed, fine = checked(worker, crash, kernel, seeds=1)
    assert crashed.failure is not None
    assert "status 7" in crashed.failure
    assert fine.passed
    with checker("interpreter") as own:
        assert checked(own, kernel, seeds=1)[0].passed
        (hung,) = checked(own, hang, timeout_s=0.5)
        assert hung.failure == "no answer within 0.5 s"


def test_a_gpu_that_is_not_there_is_said() -> None:
    from torch.cuda import is_available

    if is_available():
        pytest.skip("there is a GPU")
    with checker("gpu") as own:
        (check,) = checked(own, softmax())
    assert not check.passed
    assert "torch sees none" in (check.failure or "")


def test_a_child_that_cannot_start_gives_its_last_words() -> None:
    with Worker("fusion_advisor.no_such_module") as broken:
        answer = broken.submit(
            CheckJob(softmax(), 1, criterion_of(load_rulebook().verify)), Check, timeout_s=60
        )
        with pytest.raises(WorkerError, match="no_such_module"):
            answer.result()


def test_a_reply_of_another_kind_costs_one_reply() -> None:
    job = CheckJob(softmax(), 1, criterion_of(load_rulebook().verify))
    with checker("interpreter") as own:
        with pytest.raises(WorkerError, match="Case without"):
            own.submit(job, Case, timeout_s=60).result(timeout=90)
        assert own.submit(job, Check, timeout_s=60).result(timeout=90).passed


def test_zero_sized_tensors_pass(worker: Worker) -> None:
    empty = Case("0x37", (Tensor((0, 37), (37, 1), "float32"),), 0, 0)
    guarded = changed(
        softmax(),
        "    with torch.cuda",
        "    if not y.numel():\n        return y\n    with torch.cuda",
    )
    (check,) = checked(worker, replace(guarded, cases=(empty,)))
    assert check.failure is None


def _gather(rows: int, stride: int = 96) -> Kernel:
    """Rows of a table that indices name, as a kernel that serves any stride of the table."""
    text = """
import torch
import triton
import triton.language as tl


@triton.jit
def gather_kernel(table_ptr, index_ptr, out_ptr, cols, stride, COLS: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, COLS)
    mask = col < cols
    place = tl.load(index_ptr + row)
    x = tl.load(table_ptr + place * stride + col, mask=mask, other=0.0)
    tl.store(out_ptr + row * cols + col, x, mask=mask)


def gather(table, index):
    out = torch.empty_strided((index.shape[0], table.shape[1]), (table.shape[1], 1),
                              dtype=table.dtype, device=table.device)
    gather_kernel[(index.shape[0],)](table, index, out, table.shape[1], table.stride(0),
                                     COLS=triton.next_power_of_2(table.shape[1]))
    return out


def reference(table, index):
    return torch.ops.aten.embedding.default(table, index)
"""
    inputs = (
        Tensor((rows, 90), (stride, 1), "float32"),
        Tensor((5,), (1,), "int64"),
    )
    case = Case("rows", inputs, None, 5 * 90 * 4, (None, (0, rows)))
    return Kernel("gather", "gather", text, ("table", "index"), ("float32",), (case,))


def test_rows_of_a_table(worker: Worker) -> None:
    (check,) = checked(worker, _gather(40), timeout_s=30)
    assert check.failure is None
    assert check.shapes == ("rows: 40x90 float32, 5 int64",)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("place * stride", "place * cols"),
        ("place * stride", "place"),
        ("place * stride", "row * stride"),
        ("place * stride", "(place + 1) * stride"),
        ("place * stride + col", "place * stride + COLS - 1 - col"),
    ],
)
def test_wrong_rows_of_a_table_are_caught(worker: Worker, old: str, new: str) -> None:
    assert "no answer" not in failure(worker, changed(_gather(40), old, new))
