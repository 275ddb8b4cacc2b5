"""Wavefronts that the L1 needs for a warp's request, from the addresses of its lanes.

A request is looked up four lines at a time, the lowest first, each in a bank of tags of its own: a
line's bank is all its number's pairs of bits, one exclusive-or the other. Of the lines that are
looked up together, words in one bank of the L1 follow each other. Requests of 8 bytes a lane go
half a warp at a time, of 16 a quarter. Beside what an H200 counted (`benchmarks/results/l1.md`)
that is right to the wavefront for nine loads of ten of one element a lane; vectors that lie apart
take more, and stores that do take fewer, which is left out: emitted kernels have few of either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from fusion_advisor.rulebook.devices import LINE_BYTES

WORD_BYTES = 4
BANKS = 32
"""Banks of words in the L1 and in shared memory, which are one memory."""
TAG_BANKS = 4


@lru_cache(maxsize=1 << 14)  # the sets that a search judges ask for the same few again and again
def wavefronts_of(addresses: tuple[int | None, ...], width: int) -> int:
    """Wavefronts of one request for `width` bytes at each lane's address; None for a lane that asks
    for nothing. A request in which no lane asks takes one wavefront, too."""
    at_once = max(1, len(addresses) * WORD_BYTES // max(width, WORD_BYTES))
    parts = (addresses[start : start + at_once] for start in range(0, len(addresses), at_once))
    return max(1, sum(_served(part, width) for part in parts))


def _served(addresses: Sequence[int | None], width: int) -> int:
    """Lanes that are served together: their lines are looked up from the lowest on, as far
    as they fit."""
    waiting: dict[int, set[int]] = {}
    for address in sorted(address for address in addresses if address is not None):
        words = range(address // WORD_BYTES, (address + width - 1) // WORD_BYTES + 1)
        waiting.setdefault(address // LINE_BYTES, set()).update(words)
    found = 0
    while waiting:
        together: dict[int, int] = {}
        for line in waiting:
            together.setdefault(_tag_bank(line), line)
        words = Counter(word % BANKS for line in together.values() for word in waiting.pop(line))
        found += max(words.values())
    return found


def _tag_bank(line: int) -> int:
    """A line before the tensor, of lanes whose mask nobody knows, is as far behind it."""
    bank, line = 0, abs(line)
    while line:
        line, pair = divmod(line, TAG_BANKS)
        bank ^= pair
    return bank
