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
from itertools import count

ROUNDS = 7
SHARES = {"random16": 8, "random32": 4}
"""How many elements share a block of four words."""
STATE = ("seed", "offset")
"""The tensors of one int64 each from which a launcher's random numbers follow."""
REFERENCE_RANDOM = (
    *("between", "chance", "dropped", "laid_out", "normal", "random_bits", "uniform"),
)
"""Functions of the shipped runtime that references call; the launcher's own are not among them."""
DIGITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Binary digits of a number between 0 and 1 that any of the dtype's floats can tell apart."""


def threshold(p: float) -> int:
    """The least int32 that `random16` or `random32` reaches with probability 1 - p, to 2**-32."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


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
