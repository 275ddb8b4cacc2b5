"""The hand-written kernels of `kernels/` as records, with their cases and launches. No torch."""

from __future__ import annotations

from pathlib import Path

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Kernel, Launch

_FOLDER = Path(__file__).parent / "kernels"
SIZES = ((5, 37), (3, 128), (1, 200))
"""Rows and columns: odd ones, a power of two, a single row."""


def _matrix(rows: int, columns: int, dtype: str, gap: int = 0, offset: int = 0) -> Tensor:
    return Tensor((rows, columns), (columns + gap, 1), dtype, offset=offset)


def _vector(columns: int, dtype: str) -> Tensor:
    return Tensor((columns,), (1,), dtype)


def _pointers(names: str, kind: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"*{kind}") for name in names.split())


def _sizes(names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "i32") for name in names.split())


def _constants(**values: int) -> tuple[tuple[str, int], ...]:
    return tuple(values.items())


def _constexprs(names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, "constexpr") for name in names.split())


def softmax(sizes: tuple[tuple[int, int], ...] = SIZES) -> Kernel:
    cases = tuple(
        Case(
            f"{m}x{n}",
            (_matrix(m, n, "float32", gap=i),),
            m * n * 4,
            m * n * 4,
            loads=m * n,
            stores=m * n,
        )
        for i, (m, n) in enumerate(sizes)
    )
    launch = Launch(
        "softmax_kernel",
        _pointers("x_ptr y_ptr", "fp32")
        + _sizes("rows columns x_stride y_stride")
        + _constexprs("ROWS COLS"),
        _constants(ROWS=2, COLS=4096),
        divisible=("x_ptr", "y_ptr", "columns", "x_stride", "y_stride"),
    )
    text = (_FOLDER / "softmax.py").read_text()
    return Kernel("softmax", "softmax", text, ("x",), ("float32",), cases, (launch,))


def add_rms_norm(sizes: tuple[tuple[int, int], ...] = SIZES) -> Kernel:
    cases = tuple(
        Case(
            f"{m}x{n}",
            (
                _matrix(m, n, "bfloat16", gap=3),
                _matrix(m, n, "bfloat16", gap=1),
                _vector(n, "bfloat16"),
            ),
            2 * (2 * m * n + n),
            2 * (2 * m * n),
            loads=3 * m * n,
            stores=2 * m * n,
        )
        for m, n in sizes
    )
    launch = Launch(
        "add_rms_norm_kernel",
        _pointers("x_ptr r_ptr g_ptr h_ptr y_ptr", "bf16")
        + _sizes("rows columns x_stride r_stride h_stride y_stride")
        + _constexprs("ROWS COLS"),
        _constants(ROWS=1, COLS=4096),
        divisible=("x_ptr", "r_ptr", "g_ptr", "h_ptr", "y_ptr", "columns", "x_stride", "r_stride"),
    )
    text = (_FOLDER / "add_rms_norm.py").read_text()
    outputs = ("bfloat16", "bfloat16")
    names = ("x", "r", "g")
    return Kernel("add_rms_norm", "add_rms_norm", text, names, outputs, cases, (launch,))


def swiglu(sizes: tuple[tuple[int, int], ...] = (*SIZES, (7, 300))) -> Kernel:
    cases = tuple(
        Case(
            f"{m}x{n}",
            (
                _matrix(m, n, "bfloat16", gap=n),
                _matrix(m, n, "bfloat16", gap=n + i, offset=n),
            ),
            2 * (2 * m * n),
            2 * m * n,
            loads=2 * m * n,
            stores=m * n,
        )
        for i, (m, n) in enumerate(sizes)
    )
    launch = Launch(
        "swiglu_kernel",
        _pointers("a_ptr b_ptr y_ptr", "bf16")
        + _sizes("count columns a_stride b_stride y_stride")
        + _constexprs("BLOCK"),
        _constants(BLOCK=1024),
        divisible=("a_ptr", "b_ptr", "y_ptr"),
    )
    text = (_FOLDER / "swiglu.py").read_text()
    return Kernel("swiglu", "swiglu", text, ("a", "b"), ("bfloat16",), cases, (launch,))


def layer_norm(sizes: tuple[tuple[int, int], ...] = SIZES) -> Kernel:
    cases = tuple(
        Case(
            f"{m}x{n}",
            (_matrix(m, n, "float32", gap=5), _vector(n, "float32"), _vector(n, "float32")),
            4 * (m * n + 2 * n),
            4 * m * n,
            loads=m * n + -(-m // 4) * 2 * n,
            stores=m * n,
        )
        for m, n in sizes
    )
    launch = Launch(
        "layer_norm_kernel",
        _pointers("x_ptr g_ptr b_ptr y_ptr", "fp32")
        + _sizes("rows columns x_stride y_stride")
        + _constexprs("ROWS COLS"),
        _constants(ROWS=4, COLS=4096),
        num_warps=8,
    )
    text = (_FOLDER / "layer_norm.py").read_text()
    names = ("x", "g", "b")
    return Kernel("layer_norm", "layer_norm", text, names, ("float32",), cases, (launch,))


def masked_softmax(sizes: tuple[tuple[int, int], ...] = SIZES) -> Kernel:
    cases = tuple(
        Case(
            f"{m}x{n}",
            (_matrix(m, n, "float16", gap=2), _matrix(m, n, "bool", gap=1)),
            3 * m * n,
            2 * m * n + 8 * m,
            loads=2 * m * n,
            stores=m * n + m,
        )
        for m, n in sizes
    )
    launch = Launch(
        "masked_softmax_kernel",
        (
            ("x_ptr", "*fp16"),
            ("k_ptr", "*i1"),
            ("y_ptr", "*fp16"),
            ("n_ptr", "*i64"),
            *_sizes("rows columns x_stride k_stride y_stride"),
            *_constexprs("ROWS COLS"),
        ),
        _constants(ROWS=2, COLS=1024),
    )
    text = (_FOLDER / "masked_softmax.py").read_text()
    outputs = ("float16", "int64")
    return Kernel("masked_softmax", "masked_softmax", text, ("x", "k"), outputs, cases, (launch,))


def gelu_bias(sizes: tuple[tuple[int, int], ...] = (*SIZES, (9, 250))) -> Kernel:
    cases = tuple(
        Case(
            f"2x{m}x{n}",
            (
                Tensor((2, m, n), (n, 2 * n, 1), "float32"),
                Tensor((2, m, n), (0, 0, 1), "float32"),
            ),
            4 * (2 * m * n + n),
            4 * 2 * m * n,
            loads=2 * 2 * m * n,
            stores=2 * m * n,
        )
        for m, n in sizes
    )
    launch = Launch(
        "gelu_bias_kernel",
        _pointers("x_ptr b_ptr y_ptr", "fp32")
        + _sizes("count size_1 size_2 x_stride_0 x_stride_1 b_stride_2 y_stride_0 y_stride_1")
        + _constexprs("BLOCK"),
        _constants(BLOCK=512),
        divisible=("x_ptr", "b_ptr", "y_ptr"),
    )
    text = (_FOLDER / "gelu_bias.py").read_text()
    return Kernel("gelu_bias", "gelu_bias", text, ("x", "b"), ("float32",), cases, (launch,))


SAMPLES = (softmax, add_rms_norm, swiglu, layer_norm, masked_softmax, gelu_bias)
