"""Random numbers of the emitted files: a counter-based generator, in Triton and once more in torch.

The bits of an element depend on its number alone, so forward and backward, a kernel of any tiling
and the eager reference all draw the same: element i of a random op (in row-major order over the
op's own shape) has a word of the block `philox(seed, (i

share, stream, offset))`. `stream` numbers the draws within one file; a block is 128 bits.

- `random32`: four elements share a block, each has a 32-bit word of its own.
- `random16`: eight elements share a block, two a word; the second of them reads it with its halves
  exchanged. Each has 32 bits, so a probability p is met to 2**-32. Two of one word are decided by
  different halves unless a half equals the threshold's: their correlation is less than 2**-15 for p
  from 2**-17 to 1
- 2**-17, beyond that at most 2**-32 / min(p, 1
- p).

The generator is Philox-4x32 with seven rounds, the fewest that pass BigCrush (Salmon, Moraes, Dror
and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11, table 2).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import count

ROUNDS = 7
SHARES = {"random16": 8, "random32": 4}
"""How many elements share a block of four words."""
STATE = ("seed", "offset")
"""The tensors of one int64 each from which a launcher's random numbers follow."""
DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Binary digits of a number between 0 and 1 that any of the dtype's floats can tell apart."""


def threshold(p: float) -> int:
    """The least int32 that `random16` or `random32` reaches with probability 1 - p, to 2**-32."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


_BLOCKS = f"""\
@triton.jit
def blocks(seed, offset, stream, number):
    # Philox-4x32 with {ROUNDS} rounds: four words of each block.
    low, high = number.to(tl.uint32), (number.to(tl.uint64) >> 32).to(tl.uint32)
    after = low * 0
    first, second = after + offset.to(tl.uint32), after + (offset >> 32).to(tl.uint32)
    return tl.philox(seed, low, high + (stream << 16), first, second, {ROUNDS})
"""
_RANDOM16 = """\
@triton.jit
def random16(seed, offset, stream, element):
    # Eight elements share a block, two a word: the second has it with its halves exchanged.
    a, b, c, d = blocks(seed, offset, stream, element >> 3)
    which = element & 7
    word = tl.where(which < 4, tl.where(which < 2, a, b), tl.where(which < 6, c, d))
    word = tl.where((which & 1) == 1, (word << 16) | (word >> 16), word)
    return word.to(tl.int32, bitcast=True)
"""
_RANDOM32 = """\
@triton.jit
def random32(seed, offset, stream, element):
    # Four elements share a block.
    a, b, c, d = blocks(seed, offset, stream, element >> 2)
    which = element & 3
    word = tl.where(which < 2, tl.where(which < 1, a, b), tl.where(which < 3, c, d))
    return word.to(tl.int32, bitcast=True)
"""
_RUN = """\
@triton.jit
def {name}_run(seed, offset, stream, first, COUNT: tl.constexpr, SHARED: tl.constexpr):
    # COUNT elements from `first` on; a block is made once when they begin with a whole one.
    number = tl.arange(0, COUNT // {share} if SHARED else COUNT)
    if len(first.shape) == 2:
        number = number[None, :]
    if not SHARED:
        bits = {name}(seed, offset, stream, first + number)
    else:
        number += first // {share}
        a, b, c, d = blocks(seed, offset, stream, number)
        words = tl.join(tl.join(a, c), tl.join(b, d))
{halves}        if len(first.shape) == 2:
            words = tl.reshape(words, [number.shape[0], COUNT])
        else:
            words = tl.reshape(words, [COUNT])
        bits = words.to(tl.int32, bitcast=True)
    return bits
"""
_HALVES = "        words = tl.join(words, (words << 16) | (words >> 16))\n"

KERNEL_HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "blocks": (_BLOCKS, ()),
    "random16": (_RANDOM16, ("blocks",)),
    "random32": (_RANDOM32, ("blocks",)),
    "random16_run": (_RUN.format(name="random16", share=8, halves=_HALVES), ("random16",)),
    "random32_run": (_RUN.format(name="random32", share=4, halves=""), ("random32",)),
}
"""Functions of the kernels, each with those that it calls."""


_RANDOM_STATE = '''\
def random_state(seed, offset, device):
    """Seed and offset as the kernels read them: one int64 each, on the device."""
    if seed is None:
        seed, _, drawn = torch.randint(2**63 - 1, (3,), device=device)  # 16 bytes apart
        offset = drawn if offset is None else offset
    offset = 0 if offset is None else offset
    state = (seed, offset)
    return [
        s.reshape(()) if isinstance(s, torch.Tensor) else torch.full((), s, device=device)
        for s in state
    ]
'''
_PHILOX = f'''\
def philox(seed, offset, stream, number):
    """The four words of some blocks, as the kernels make them."""
    low = 2**32 - 1
    a, b = number & low, (number >> 32) + (stream << 16)
    c, d = offset & low, offset >> 32 & low
    left, right = seed & low, seed >> 32 & low
    for _ in range({ROUNDS}):
        first, second = a * 0xD2511F53, c * 0xCD9E8D57
        a, b = (second >> 32 & low) ^ b ^ left, second & low
        c, d = (first >> 32 & low) ^ d ^ right, first & low
        left, right = (left + 0x9E3779B9) & low, (right + 0xBB67AE85) & low
    return torch.stack([a, b, c, d], -1)
'''
_BITS = '''\
def random_bits(shape, share, seed, offset, stream, device):
    """The kernels' random bits, `share` elements to a block, as signed 32-bit numbers."""
    count = torch.Size(shape).numel()
    number = torch.arange(-(-count // share), device=device)
    words = philox(seed, offset, stream, number)
    if share == 8:
        words = torch.stack([words, (words << 16 | words >> 16) & (2**32 - 1)], -1)
    return ((words.flatten()[:count] ^ 2**31) - 2**31).reshape(shape)
'''
_DROPPED = '''\
def dropped(x, bits, p):
    """Zero with probability p, else divided by 1 - p; and which elements are kept."""
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    kept = laid_out(bits >= min(round(p * 2**32), 2**32 - 1) - 2**31, x, torch.bool)
    return x * kept * (1.0 / (1.0 - p)), kept
'''
_LAID_OUT = '''\
def laid_out(values, x, dtype):
    """Values in another dtype, in memory as x is."""
    return torch.empty_like(x, dtype=dtype).copy_(values)
'''
_CHANCE = '''\
def chance(bits, p):
    """True with probability p, to 2**-32."""
    return bits >= min(round((1.0 - p) * 2**32), 2**32 - 1) - 2**31 if p else bits != bits
'''
_DIGITS = '''\
def random_digits(digits, bits):
    """Binary digits as an integer, and the dtype that holds them."""
    if len(bits) == 1:
        return bits[0] & 2**digits - 1, torch.float32
    above = digits - 26
    return (bits[0] & 2**above - 1) * 2**26 + (bits[1] & 2**26 - 1), torch.float64
'''
_UNIFORM = '''\
def uniform(digits, *bits):
    """Multiples of 2**-digits from 0 to 1, 1 left out."""
    number, dtype = random_digits(digits, bits)
    return number.to(dtype) * 2.0**-digits
'''
_BETWEEN = '''\
def between(digits, *bits):
    """Odd multiples of 2**-digits between 0 and 1."""
    number, dtype = random_digits(digits - 1, bits)
    return (number * 2 + 1).to(dtype) * 2.0**-digits
'''
_NORMAL = '''\
def normal(radius, angle):
    """Normal numbers from pairs of uniform ones (Box and Muller)."""
    return torch.sqrt(torch.log(radius) * -2.0) * torch.cos(angle * (2.0 * torch.pi))
'''

_REFERENCE_HELPERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "random_state": (_RANDOM_STATE, ()),
    "philox": (_PHILOX, ()),
    "random_bits": (_BITS, ("philox",)),
    "laid_out": (_LAID_OUT, ()),
    "dropped": (_DROPPED, ("laid_out",)),
    "chance": (_CHANCE, ()),
    "random_digits": (_DIGITS, ()),
    "uniform": (_UNIFORM, ("random_digits",)),
    "between": (_BETWEEN, ("random_digits",)),
    "normal": (_NORMAL, ()),
}
NAMES = frozenset({*KERNEL_HELPERS, *_REFERENCE_HELPERS, *STATE})
"""Names that an emitted file with random numbers defines."""


def kernel_helpers(names: Iterable[str]) -> dict[str, str]:
    """The texts of some functions of the kernels, what they call first."""
    return _with_callees(KERNEL_HELPERS, names)


def reference_helpers(lines: Iterable[str]) -> dict[str, str]:
    """The texts of the functions that lines of a reference call."""
    text = "\n".join(lines)
    return _with_callees(
        _REFERENCE_HELPERS, [name for name in _REFERENCE_HELPERS if f"{name}(" in text]
    )


def _with_callees(
    known: dict[str, tuple[str, tuple[str, ...]]], names: Iterable[str]
) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        text, callees = known[name]
        found |= _with_callees(known, callees)
        found[name] = text
    return found


def reference_text(template: str, dtype: str, stream: int, shape: str, device: str) -> str:
    """A random op's reference with its random bits filled in, from the draw `stream` on.

    `<random16>` and `<random32>` stand for bits; `<rand>` for uniform numbers of the dtype's own
    digits, `<uniform>` and `<between>` for such of the type in which it is computed.
    """
    held = "float64" if dtype == "float64" else "float32"
    own = DIGITS.get(dtype, DIGITS[held])
    for name, digits in (("rand", own), ("uniform", DIGITS[held]), ("between", DIGITS[held])):
        bits = ["<random32>"] * (2 if digits > DIGITS["float32"] else 1)
        function = "between" if name == "between" else "uniform"
        template = template.replace(f"<{name}>", f"{function}({digits}, {', '.join(bits)})")
    numbers = count(stream)

    def bits_of(found: re.Match[str]) -> str:
        share = SHARES[found[1]]
        return f"random_bits({shape}, {share}, seed, offset, {next(numbers)}, {device}.device)"

    return re.sub(r"<(random\d+)>", bits_of, template)
