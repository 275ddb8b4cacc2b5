"""The sizes of the series: some by hand, and more drawn at random, the same at every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

Shape = tuple[int, ...]
Draw = Callable[[Random], Shape]

LEAST, MOST = 1 << 12, 1 << 29
"""Elements of a tensor that is drawn."""

ROWS: tuple[Shape, ...] = (
    (16, 256), (64, 1024), (256, 1024), (1024, 1024), (2048, 2048), (4096, 4096),
    (16384, 4096), (65536, 8192), (131072, 128), (1048576, 64), (32, 262144), (4095, 1023),
    (65535, 2047), (512, 16384),
)  # fmt: skip
IMAGES: tuple[Shape, ...] = (
    (8, 16, 30, 30), (16, 64, 56, 56), (64, 64, 112, 112), (128, 32, 126, 126), (16, 128, 255, 255),
)  # fmt: skip
VOLUMES: tuple[Shape, ...] = ((8, 16, 16, 32, 32), (16, 32, 24, 48, 48), (16, 64, 31, 62, 62))
COLUMNS: tuple[Shape, ...] = (
    (16, 256, 30), (64, 1024, 256), (128, 4096, 511), (16, 128, 65536), (512, 64, 4096),
)  # fmt: skip
SIGNALS: tuple[Shape, ...] = ((8, 16, 1000), (64, 128, 16384), (64, 192, 65536))
HEADS: tuple[Shape, ...] = ((1, 8, 512, 128), (4, 512, 32, 64), (64, 512, 1, 96), (4, 32, 2048, 64))


def drawn(name: str, draw: Draw, count: int) -> list[Shape]:
    """As many shapes, the same for the same name."""
    random = Random(name)
    return [draw(random) for _ in range(count)]


def rows(random: Random) -> Shape:
    """Rows of 16 to 262144 elements."""
    return _with_first(random, (_size(random, 16, 1 << 18),), LEAST, MOST)


def features(random: Random) -> Shape:
    """Rows of 256 to 16384 features, by 64."""
    return _with_first(random, (_size(random, 256, 1 << 14) // 64 * 64,), 1 << 16, MOST >> 2)


def ones(random: Random) -> Shape:
    """Columns of one."""
    return (_size(random, 64, 1 << 22), 1)


def columns(random: Random) -> Shape:
    """To be reduced along the middle."""
    return _with_first(random, (_size(random, 16, 8192), _size(random, 8, 1 << 16)), LEAST, MOST)


def images(random: Random) -> Shape:
    """Batches of images of 8 to 1024 channels and 14 to 512 places a side."""
    side = _size(random, 14, 512)
    return _with_first(random, (8 * _size(random, 1, 128), side, side), LEAST, MOST)


def volumes(random: Random) -> Shape:
    """Batches of volumes of 8 to 128 channels."""
    side, depth = _size(random, 8, 96), _size(random, 6, 48)
    return _with_first(random, (8 * _size(random, 1, 16), depth, side, side), LEAST, MOST)


def signals(random: Random) -> Shape:
    """Batches of channels over time."""
    return _with_first(random, (_size(random, 8, 512), _size(random, 64, 1 << 17)), LEAST, MOST)


def heads(random: Random) -> Shape:
    """Batch, heads, tokens and columns of attention."""
    columns = random.choice((64, 80, 96, 128))
    return _with_first(
        random, (_size(random, 4, 64), _size(random, 64, 4096), columns), LEAST, MOST >> 2
    )


def odd_images(random: Random) -> Shape:
    """Batches of images whose sides are odd: no plane begins where the one before ended evenly."""
    side = _size(random, 30, 512) | 1
    return _with_first(random, (8 * _size(random, 1, 32), side, side), MOST >> 10, MOST >> 1)


def odd_volumes(random: Random) -> Shape:
    """Batches of volumes whose sides are odd."""
    side = _size(random, 15, 96) | 1
    return _with_first(random, (8 * _size(random, 1, 8), side, side, side), MOST >> 8, MOST >> 1)


def short_heads(random: Random) -> Shape:
    """Windows, heads, tokens and few columns."""
    columns = random.choice((16, 32, 48, 64))
    return _with_first(random, (_size(random, 2, 32), 49, columns), MOST >> 12, MOST >> 4)


def tokens(random: Random) -> Shape:
    """Batch, features and tokens."""
    features = 32 * _size(random, 2, 40)
    return _with_first(random, (features, _size(random, 64, 4096)), MOST >> 12, MOST >> 3)


def clusters(random: Random) -> Shape:
    """Rows of a few dozen."""
    return _with_first(random, (8 * _size(random, 2, 24),), MOST >> 12, MOST >> 3)


def held_rows(random: Random) -> Shape:
    """Rows that a block of eager's holds in registers."""
    return _with_first(random, (_size(random, 2048, 9216),), MOST >> 12, MOST >> 2)


def long_rows(random: Random) -> Shape:
    """Rows that it does not."""
    return _with_first(random, (_size(random, 9217, 1 << 16),), MOST >> 8, MOST)


def squares(random: Random) -> Shape:
    """As many rows as columns."""
    side = _size(random, 256, 1 << 14)
    return side, side


def _with_first(random: Random, rest: Shape, least: int, most: int) -> Shape:
    """A first dimension that makes as many elements in all, as far as the others let it."""
    each = math.prod(rest)
    return (max(1, _size(random, max(least, each), max(most, each)) // each), *rest)


def _size(random: Random, least: int, most: int) -> int:
    """Any order of magnitude alike; every second is a round number, as models' sizes are."""
    size = round(math.exp(random.uniform(math.log(least), math.log(most))))
    if random.random() < 0.5:
        unit = 1 << max(0, size.bit_length() - 2)
        size = max(least, size // unit * unit)
    return size
