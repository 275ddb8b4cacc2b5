"""Repairs of Triton's interpreter, by which `TRITON_INTERPRET=1` runs kernels on a CPU.

The runtime beside emitted kernels imports them where this package is installed, of any version:
`install()` stays here under this name. It repairs, for Triton 3.6 to 3.9:

- fp32 to bf16 and fp8 rounds to nearest even instead of truncating; bf16 arithmetic is done in fp32
  and rounded, instead of on the bit patterns;
- `tl.maximum` and `tl.clamp` without `propagate_nan` drop NaN as the hardware does (3.6 propagates
  it);
- a tensor of one element is a number wherever Python asks for one (3.6 refuses with numpy 2.4);
- `tl.reduce` and `tl.associative_scan` run the real combine function on whole halves of the array,
  O(log n) calls, instead of once an element;
- `libdevice` exists: computed in float64 by torch, rounded to the operand's type;
- `tl.fma` of fp32 rounds once (3.6 rounds twice);
- a scalar comparison that is spread over a block stays boolean;
- overflow and division by zero in masked lanes are silent;
- the language is patched once for the process, not at every call of a device function.
"""

import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime.interpreter import TensorHandle, np  # numpy, which the interpreter runs on

_SEMANTIC = TritonSemantic(interpreter.interpreter_builder)

# -- low precision: every conversion goes through here -------------------------------------------

_FP8 = {
    tl.float8e5: torch.float8_e5m2,
    tl.float8e5b16: torch.float8_e5m2fnuz,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e4b8: torch.float8_e4m3fnuz,
}


def _is_packed(kind):
    """Whether the interpreter stores the type as a bit pattern, not as numbers."""
    return kind == tl.bfloat16 or kind in _FP8


def _decode(data, kind):
    """Decode bit patterns to numbers: exact, as fp32."""
    if kind == tl.bfloat16:
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind in _FP8:
        packed = torch.from_numpy(np.ascontiguousarray(data, dtype=np.uint8))
        return packed.view(_FP8[kind]).to(torch.float32).numpy().reshape(data.shape)
    return data


def _encode(data, kind):
    """Round numbers to nearest even; fp8 saturates, as `cvt.rn.satfinite` does."""
    if kind == tl.bfloat16:
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        rounded = (bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)
        quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
        is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        return np.where(is_nan, quiet, rounded).astype(np.uint16).reshape(data.shape)
    if kind in _FP8:
        top = torch.finfo(_FP8[kind]).max
        wide = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).clamp(-top, top)
        return wide.to(_FP8[kind]).view(torch.uint8).numpy().reshape(data.shape)
    return data.astype(interpreter._get_np_dtype(kind))


def _cast(_self, src, dst_type):
    kind = dst_type.scalar
    return TensorHandle(_encode(_decode(src.data, src.dtype.scalar), kind), kind)


def _fp_to_fp(self, src, dst_type, _rounding):
    return _cast(self, src, dst_type)


def _splat(_self, block, scalar):
    """Broadcast a scalar to a block; the result of a comparison is boolean, which its own handle
    does not say."""
    kind = block.scalar
    data = np.full(block.shape, scalar.data, dtype=interpreter._get_np_dtype(kind))
    return TensorHandle(data, kind)


def _wide(original):
    """Operator that computes packed types in fp32 and rounds the result back."""

    def operator(self, *arguments):
        *handles, function = arguments
        kind = handles[-1].dtype.scalar
        if not _is_packed(kind):
            return original(self, *arguments)
        result = function(*(_decode(handle.data, handle.dtype.scalar) for handle in handles))
        if result.dtype != np.bool_:
            result = _encode(result, kind)
        return TensorHandle(result, kind)

    return operator


def _select(_self, condition, left, right):
    return TensorHandle(np.where(condition.data, left.data, right.data), right.dtype.scalar)


def _clamp(self, value, low, high, propagate_nan):
    """Clamp a number between two; NaN becomes the lower bound, unless NaN is to be propagated."""
    if propagate_nan == tl.PropagateNan.NONE:
        return self.binary_op(self.binary_op(value, low, np.fmax), high, np.fmin)
    return self.ternary_op(value, low, high, np.clip)


def _fma(original):
    """Multiply and add: a product of fp32 is exact in fp64."""

    def fma(self, x, y, z):
        if z.dtype.scalar != tl.float32:
            return original(self, x, y, z)
        wide = [each.data.astype(np.float64) for each in (x, y, z)]
        return TensorHandle((wide[0] * wide[1] + wide[2]).astype(np.float32), tl.float32)

    return fma


# -- reductions and scans by their real combine functions ----------------------------------------


def _tensor(data, kind):
    shape = list(data.shape)
    return tl.core.tensor(TensorHandle(data, kind), tl.block_type(kind, shape) if shape else kind)


def _combine(function, left, right):
    result = function.fn(*left, *right)
    return list(result) if isinstance(result, tuple) else [result]


def _slice(values, axis, part):
    cut = (slice(None),) * axis + (part,)
    return [_tensor(value.handle.data[cut], value.dtype) for value in values]


def _tree_reduce(self, inputs):
    """Fold the halves of the array onto each other until one element is left."""
    axis = self.axis
    values = list(inputs)
    rank = values[0].handle.data.ndim
    if axis is None:
        values = [_tensor(value.handle.data.reshape(-1), value.dtype) for value in values]
        axis = 0
    size = values[0].handle.data.shape[axis]
    while size > 1:
        half = size // 2
        low, high = slice(0, half), slice(half, 2 * half)
        folded = _combine(self.combine_fn, _slice(values, axis, low), _slice(values, axis, high))
        if size % 2:
            last = _slice(values, axis, slice(size - 1, size))
            folded = _combine(self.combine_fn, folded, last) if half == 1 else folded
        values, size = folded, half
    return [self._finish(value, axis, rank) for value in values]


def _finish(self, value, axis, rank):
    data = np.squeeze(value.handle.data, axis)
    if self.keep_dims:
        data = data.reshape((1,) * rank) if self.axis is None else np.expand_dims(data, axis)
    return self.to_tensor(data if data.shape else data[()], value.dtype)


def _reduce(original):
    plain = (tl.standard._sum_combine, tl.standard._elementwise_max, tl.standard._elementwise_min)

    def apply_impl(self, inputs):
        known = any(self.combine_fn is function for function in plain)
        if known and not _is_packed(inputs[0].dtype.scalar):
            return original(self, inputs)
        return _tree_reduce(self, inputs)

    return apply_impl


def _tree_scan(self, inputs):
    """Inclusive scan by doubling: each element takes in the one `step` before it."""
    values = list(inputs)
    axis, size, step = self.axis, values[0].handle.data.shape[self.axis], 1
    places = np.arange(size).reshape([-1 if d == axis else 1 for d in range(len(values[0].shape))])
    while step < size:
        early = [_tensor(np.roll(v.handle.data, step, axis), v.dtype) for v in values]
        joined = _combine(self.combine_fn, early, values)
        values = [
            _tensor(np.where(places >= step, new.handle.data, old.handle.data), old.dtype)
            for new, old in zip(joined, values, strict=True)
        ]
        step *= 2
    return values


def _sum_scan(self, value):
    """Running sum, added up by doubling as the GPU does."""
    data, size, step = value.handle.data, value.handle.data.shape[self.axis], 1
    places = np.arange(size).reshape([-1 if d == self.axis else 1 for d in range(data.ndim)])
    while step < size:
        data = np.where(places >= step, data + np.roll(data, step, self.axis), data)
        step *= 2
    return [_tensor(data, value.dtype)]


# -- libdevice -----------------------------------------------------------------------------------


def _wide_tensor(data):
    return torch.from_numpy(np.ascontiguousarray(data, dtype=np.float64))


def _extern(name, function):
    """Device function over fp32 or fp64 operands. Raises TypeError for others, as when compiled."""

    def call(*args, **_named):
        operands = [_SEMANTIC.to_tensor(arg) for arg in args]
        kinds = {operand.dtype.scalar for operand in operands}
        if len(kinds) != 1 or not kinds <= {tl.float32, tl.float64}:
            raise TypeError(f"libdevice.{name} takes fp32 or fp64, got {sorted(map(str, kinds))}")
        kind = kinds.pop()
        arrays = np.broadcast_arrays(*(operand.handle.data for operand in operands))
        result = function(*map(_wide_tensor, arrays)).numpy()
        if result.dtype == np.bool_:
            kind = tl.int1
        block = any(operand.type.is_block() for operand in operands)
        handle = TensorHandle(result.astype(interpreter._get_np_dtype(kind)), kind)
        return tl.core.tensor(handle, tl.block_type(kind, list(result.shape)) if block else kind)

    return call


def _cuda_round(x):
    """Round half away from zero, unlike `torch.round`."""
    return torch.copysign(torch.floor(x.abs() + 0.5), x)


_SAME_NAME = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "ceil", "copysign"),
    *("cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1", "floor", "fmax", "fmin", "fmod"),
    *("hypot", "isinf", "isnan", "lgamma", "log", "log10", "log1p", "log2", "nextafter", "pow"),
    *("rsqrt", "signbit", "sin", "sinh", "sqrt", "tan", "tanh", "trunc"),
)
"""Functions that torch calls by the same name."""

_LIBDEVICE = {
    **{name: getattr(torch, name) for name in _SAME_NAME},
    "finitef": torch.isfinite,
    "isfinited": torch.isfinite,
    "cbrt": lambda x: torch.copysign(x.abs().pow(1.0 / 3.0), x),
    "div_rn": torch.div,
    "erfcx": torch.special.erfcx,
    "erfinv": torch.erfinv,
    "exp10": lambda x: torch.pow(10.0, x),
    "fast_dividef": torch.div,
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_tanhf": torch.tanh,
    "fma": lambda x, y, z: x * y + z,
    "j0": torch.special.bessel_j0,
    "j1": torch.special.bessel_j1,
    "mul_rn": torch.mul,
    "nearbyint": torch.round,
    "norm_cdf": torch.special.ndtr,
    "normcdf": torch.special.ndtr,
    "rint": torch.round,
    "round": _cuda_round,
    "sqrt_rn": torch.sqrt,
    "tgamma": lambda x: torch.exp(torch.lgamma(x)),
}


def _install_libdevice():
    """Replace the stubs; the others keep failing by name instead of returning None."""
    for name, stub in list(vars(libdevice).items()):
        if callable(stub) and getattr(stub, "__module__", "") == libdevice.__name__:
            function = _LIBDEVICE.get(name)
            setattr(libdevice, name, _extern(name, function) if function else _missing(name))


def _missing(name):
    def call(*_args, **_named):
        raise NotImplementedError(
            f"libdevice.{name} has no function of torch's here: add it to _LIBDEVICE of {__file__}"
        )

    return call


# -- installation ----------------------------------------------------------------------------------


class _Forever:
    """Patch scope of a launch, when the language stays patched for the whole process."""

    def restore(self):
        """Keep the language patched: there is nothing to restore."""


def _patch_language_once():
    """Patch `tl` once: the interpreter does it at each call of a device function, which costs
    milliseconds each."""

    def example():
        """Function whose globals hold the language modules to patch: `tl` and this one."""
        return core

    interpreter._patch_lang(example)
    tl.core.tensor.__index__ = lambda self: int(self.handle.data.item())
    interpreter._patch_lang = lambda _fn: _Forever()


def _np_dtype(original):
    """Cache the dtype conversion: the interpreter builds its table of types anew at each call."""
    known = {}

    def np_dtype(kind):
        scalar = kind.scalar
        if isinstance(scalar, tl.pointer_type):
            return original(scalar)
        if scalar.name not in known:
            known[scalar.name] = original(scalar)
        return known[scalar.name]

    return np_dtype


def install():
    """Repair the interpreter for this process, once, whatever folder asks for it."""
    if getattr(interpreter, "fused_interpreter", False):
        return
    interpreter.fused_interpreter = True
    interpreter._get_np_dtype = _np_dtype(interpreter._get_np_dtype)
    builder = interpreter.InterpreterBuilder
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _fp_to_fp
    builder.get_bf16 = lambda self, value: _cast(self, self.get_fp32(value), tl.bfloat16)
    builder.binary_op = _wide(builder.binary_op)
    builder.unary_op = _wide(builder.unary_op)
    builder.create_select = _select
    builder.create_splat = _splat
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    builder.create_clampf = _clamp
    builder.create_fma = _fma(builder.create_fma)
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    interpreter.ReduceOps.apply_impl = _reduce(interpreter.ReduceOps.apply_impl)
    interpreter.ReduceOps._finish = _finish
    interpreter.ScanOps.generic_scan = _tree_scan
    interpreter.ScanOps.cumsum = _sum_scan
    interpreter.GridExecutor.__call__ = _silent(interpreter.GridExecutor.__call__)
    # Sums that overflow would only be reported with `debug`; to look for them is half the time.
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    _install_libdevice()
    _patch_language_once()


def _silent(original):
    """Launch without numpy's warnings of overflow and division by zero."""

    def launch(self, *args, **kwargs):
        with np.errstate(all="ignore"):
            return original(self, *args, **kwargs)

    return launch
