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

WAYS = 5
"""Ways to widen a value: the plain one first, then `widened_1` and so on of the shipped device
functions."""
