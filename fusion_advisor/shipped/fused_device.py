# SPDX-License-Identifier: 0BSD
"""Device functions that the kernels beside this file share.

Written by fusion-advisor, with what these kernels import and no more.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

# -- math, and what combines two values ------------------------------------------------------------


@triton.jit
def as_float8_e5m2(x):
    # What rounds beyond the largest number is infinite to torch; the hardware stops there.
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    infinite = tl.where(x < 0.0, 0xFC, 0x7C).to(tl.uint8)
    bits = tl.where(tl.abs(x) >= 61440.0, infinite, bits)
    return bits.to(tl.float8e5, bitcast=True)


@triton.jit
def share_of(x, total):
    # x / total as a division rounds it, where total is 1 at the least and x is none of the largest:
    # a quotient from the reciprocal, which a row has once, and what that leaves over.
    inverse = tl.div_rn(1.0, total)
    share = x * inverse
    return tl.fma(tl.fma(-share, total, x), inverse, share)


@triton.jit
def divided(x, y):
    # x / y as a division rounds it, where many x have one y: a quotient from the reciprocal, and
    # what that leaves over; both moved by powers of two where the reciprocal of y would be out of
    # range. A quotient of infinity or zero, or beyond the largest number, leaves over nothing
    # finite, and is right already. What an x below 1e-31 leaves over float32 may not hold: then the
    # last bit can differ.
    size = tl.abs(y)
    scale = tl.where(size < 1e-18, 2.0**60, tl.where(size > 1e18, 2.0**-60, 1.0))
    near = y * scale
    inverse = tl.div_rn(1.0, near)
    x = x * scale
    quotient = x * inverse
    rest = tl.fma(-quotient, near, x)
    return tl.where(tl.abs(rest) < float("inf"), tl.fma(rest, inverse, quotient), quotient)


@triton.jit
def max_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def min_nan(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def narrow_tanh(x):
    # Good to 16-bit results, relative error 2e-5: near zero, where the quotient cancels, a series.
    square = x * x
    far = 1.0 - libdevice.fast_dividef(2.0, tl.exp2(x * 2.88539008) + 1.0)
    return tl.where(square < 1e-4, x - x * square * 0.33333333, far)


@triton.jit
def wide_tanh(x):
    # tanh(x) within 2 ulp of float32, without a branch, at which lanes would wait. Near zero, where
    # the quotient cancels, it is an odd polynomial, fitted to the least relative error.
    size = tl.abs(x)
    square = x * x
    power = 0.016437469 * square - 0.052671757
    power = power * square + 0.13320725
    power = power * square - 0.33332947
    near = tl.fma(power * square, size, size)
    far = 1.0 - libdevice.fast_dividef(2.0, tl.exp2(size * 2.88539008) + 1.0)
    return libdevice.copysign(tl.where(size < 0.55, near, far), x)


@triton.jit
def narrow_erf(x):
    # Good to 16-bit results, relative error 1e-5: erfc is 2 to the power of a polynomial fitted to
    # its logarithm; near zero, where 1 - erfc cancels, a series.
    square = x * x
    near = x * (1.1283792 + square * (-0.37612639 + square * 0.11283792))
    t = tl.minimum(tl.abs(x) * 1.4142135, 16.0)
    power = -1.8209877e-06 * t + 6.1363673e-05
    power = power * t - 0.00092898862
    power = power * t + 0.0085030086
    power = power * t - 0.053952299
    power = power * t - 0.45847011
    power = power * t - 1.1512495
    power = power * t - 0.99999535
    far = 1.0 - 2.0 * tl.exp2(power)
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, tl.where(x == x, far, x)))


@triton.jit
def one_plus_erf(x):
    # 1 + erf(x) within an ulp of 1: erfc is 2 to the power of a polynomial fitted to its logarithm,
    # of odd degree, so that it goes to zero.
    t = tl.abs(x)
    power = -1.90930245e-06 * t + 3.2739048e-05
    power = power * t - 0.000249749079
    power = power * t + 0.00108669873
    power = power * t - 0.0026190686
    power = power * t + 0.000382207043
    power = power * t + 0.0275739934
    power = power * t - 0.148266196
    power = power * t - 0.918448389
    power = power * t - 1.62790704
    complement = tl.exp2(power * t)
    return tl.where(x < 0, complement, 2.0 - complement)


@triton.jit
def one_plus_tanh(x):
    # 1 + tanh(x) within an ulp of 1.
    return libdevice.fast_dividef(2.0, 1.0 + tl.exp2(x * -2.88539008))


@triton.jit
def logistic(x):
    # 1 / (1 + exp(-x)) within 5 ulp: what rounding leaves out of the power is multiplied in again,
    # and is bounded for where the power is infinite.
    power = x * -1.44269504
    rest = tl.fma(x, -1.44269504, -power)
    rest = tl.clamp(tl.fma(x, -1.925963e-08, rest), -1.0, 1.0)
    power = tl.exp2(power) * tl.fma(rest, 0.69314718, 1.0)
    return libdevice.fast_dividef(1.0, 1.0 + power)


@triton.jit
def first_max(a, i, b, j):
    # NaN counts as the extreme; of equal ones the first.
    same = (a == b) | ((a != a) & (b != b))
    left = (a > b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def first_min(a, i, b, j):
    # NaN counts as the extreme; of equal ones the first.
    same = (a == b) | ((a != a) & (b != b))
    left = (a < b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def log_add_exp(a, b):
    # Equal infinities differ by nothing; NaN stays what it is.
    apart = tl.where(a == b, 0.0, tl.abs(a - b))
    return max_nan(a, b) + libdevice.log1p(tl.exp(-apart))


# -- places of elements ----------------------------------------------------------------------------


@triton.jit
def wide(place, FAR: tl.constexpr):
    # What offsets are made from, in 64 bits where some of them are beyond 32.
    if FAR:
        place = place + tl.full((), 0, tl.int64)
    return place


# -- what programs that share a row exchange -------------------------------------------------------


@triton.jit
def ticket(workspace_ptr, WAIT: tl.constexpr):
    # The order in which programs begin, for that of the grid is not promised. So the programs of
    # every row but the last begun are all resident or done, and nobody waits for one without room.
    if WAIT:
        number = tl.atomic_add(workspace_ptr, 1, sem="relaxed").to(tl.int32)
    else:
        number = tl.program_id(0)
    return number


@triton.jit
def publish(word_ptr, lower, upper, WAIT: tl.constexpr):
    # Two float32 as one word that is never 0: inverted, and NaN is spelled one way.
    lower = tl.where(lower == lower, lower, float("nan")).to(tl.int32, bitcast=True)
    upper = upper.to(tl.int32, bitcast=True)
    word = ~((upper.to(tl.int64) << 32) | (lower.to(tl.int64) & 0xFFFFFFFF))
    if WAIT:
        tl.atomic_xchg(word_ptr, word, sem="relaxed")
    else:
        tl.store(word_ptr, word)


@triton.jit
def published(words_ptr, mask, WAIT: tl.constexpr):
    # The words of all parts of a row, as soon as they are there.
    if WAIT:
        word = tl.inline_asm_elementwise(
            """
            {
                .reg .pred again;
                mov.u64 $0, 0;
                setp.eq.u32 again, $2, 0;
                @again bra done;
                wait: ld.relaxed.gpu.global.u64 $0, [$1];
                setp.eq.u64 again, $0, 0;
                @again bra wait;
                done:
            }
            """,
            "=&l,l,r",
            [words_ptr.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        word = tl.load(words_ptr, mask=mask, other=0)
    lower = (~word).to(tl.int32).to(tl.float32, bitcast=True)
    upper = (~word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return lower, upper


@triton.jit
def widened_1(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1044; prmt.b32 $1, $2, 0, 0x3244;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def widened_2(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "mul.lo.u32 $0, $2, 65536; and.b32 $1, $2, 0xffff0000;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def widened_3(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1055; prmt.b32 $1, $2, 0, 0x3255;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def widened_4(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, 0, 0x1066; prmt.b32 $1, $2, 0, 0x3266;",
            "=&r,=r,r",
            [x],
            dtype=tl.uint32,
            is_pure=True,
            pack=2,
        )
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x.to(tl.float32)
    return wide


# -- random numbers --------------------------------------------------------------------------------


@triton.jit
def blocks(seed, offset, stream, number):
    # Philox-4x32 with 7 rounds: four words of each block.
    low, high = number.to(tl.uint32), (number.to(tl.uint64) >> 32).to(tl.uint32)
    after = low * 0
    first, second = after + offset.to(tl.uint32), after + (offset >> 32).to(tl.uint32)
    return tl.philox(seed, low, high + (stream << 16), first, second, 7)


@triton.jit
def random16(seed, offset, stream, element):
    # Eight elements share a block, two a word: the second has it with its halves exchanged.
    a, b, c, d = blocks(seed, offset, stream, element >> 3)
    which = element & 7
    word = tl.where(which < 4, tl.where(which < 2, a, b), tl.where(which < 6, c, d))
    word = tl.where((which & 1) == 1, (word << 16) | (word >> 16), word)
    return word.to(tl.int32, bitcast=True)


@triton.jit
def random32(seed, offset, stream, element):
    # Four elements share a block.
    a, b, c, d = blocks(seed, offset, stream, element >> 2)
    which = element & 3
    word = tl.where(which < 2, tl.where(which < 1, a, b), tl.where(which < 3, c, d))
    return word.to(tl.int32, bitcast=True)


@triton.jit
def random16_run(seed, offset, stream, first, COUNT: tl.constexpr, SHARED: tl.constexpr):
    # COUNT elements from `first` on; a block is made once when they begin with a whole one.
    number = tl.arange(0, COUNT // 8 if SHARED else COUNT)
    if len(first.shape) == 2:
        number = number[None, :]
    if not SHARED:
        bits = random16(seed, offset, stream, first + number)
    else:
        number += first // 8
        a, b, c, d = blocks(seed, offset, stream, number)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        words = tl.join(words, (words << 16) | (words >> 16))
        if len(first.shape) == 2:
            words = tl.reshape(words, [number.shape[0], COUNT])
        else:
            words = tl.reshape(words, [COUNT])
        bits = words.to(tl.int32, bitcast=True)
    return bits


@triton.jit
def random32_run(seed, offset, stream, first, COUNT: tl.constexpr, SHARED: tl.constexpr):
    # COUNT elements from `first` on; a block is made once when they begin with a whole one.
    number = tl.arange(0, COUNT // 4 if SHARED else COUNT)
    if len(first.shape) == 2:
        number = number[None, :]
    if not SHARED:
        bits = random32(seed, offset, stream, first + number)
    else:
        number += first // 4
        a, b, c, d = blocks(seed, offset, stream, number)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        if len(first.shape) == 2:
            words = tl.reshape(words, [number.shape[0], COUNT])
        else:
            words = tl.reshape(words, [COUNT])
        bits = words.to(tl.int32, bitcast=True)
    return bits
