"""The functions of an emitted file by which programs that share a row exchange what they found.

How they wait without a deadlock: a program takes a ticket when it begins, and its row and part
follow from the ticket, so programs take their work in the order in which they are resident. It
leaves its words before it waits for others, and it waits for the words of its own row alone. So of
all programs that wait, those of a row whose tickets are all taken find every word in the end, since
the programs that owe them are resident and do not stop before they left them; then they finish and
make room. At most one row of a launch has tickets left to take, and fewer programs of it wait than
share a row. So a launch goes on as long as the device holds as many programs as share a row,
besides those that wait in other launches: the launcher lets programs wait only if it holds several
times as many.

A word is two float32. It travels as a whole, so it needs no fence; it is inverted, and NaN has one
spelling in its lower half, so no word is 0: that means that it is not there yet.
"""

from __future__ import annotations

_EXCHANGE: dict[str, str] = {
    "ticket": """\
@triton.jit
def ticket(workspace_ptr, WAIT: tl.constexpr):
    # The order in which programs begin, for that of the grid is not promised. So the programs of
    # every row but the last begun are all resident or done, and nobody waits for one without room.
    if WAIT:
        number = tl.atomic_add(workspace_ptr, 1, sem="relaxed").to(tl.int32)
    else:
        number = tl.program_id(0)
    return number
""",
    "publish": """\
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
""",
    "published": '''\
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
''',
}

_WIDENED = """\
@triton.jit
def widened_{way}(x, COMPILED: tl.constexpr):
    # bfloat16 to float32, spelled so that the assembler does not join it with another widening of
    # the same values: it would keep the wide ones.
    if COMPILED:
        bits = tl.inline_asm_elementwise(
            "{low} {high}",
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
"""
_SPELLINGS = (
    ("prmt.b32 $0, $2, 0, 0x1044;", "prmt.b32 $1, $2, 0, 0x3244;"),
    ("mul.lo.u32 $0, $2, 65536;", "and.b32 $1, $2, 0xffff0000;"),
    ("prmt.b32 $0, $2, 0, 0x1055;", "prmt.b32 $1, $2, 0, 0x3255;"),
    ("prmt.b32 $0, $2, 0, 0x1066;", "prmt.b32 $1, $2, 0, 0x3266;"),
)
WAYS = 1 + len(_SPELLINGS)
"""To widen a value: the plain one first."""

EXCHANGE = _EXCHANGE | {
    f"widened_{way}": _WIDENED.format(way=way, low=low, high=high)
    for way, (low, high) in enumerate(_SPELLINGS, 1)
}
"""The text of each function by its name."""
