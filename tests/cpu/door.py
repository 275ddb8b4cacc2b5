"""Commands that shells start, run in forks of the processes of `spawned`.

A shell calls the program that `door` writes as it would call Python: the program hands its words,
folder, environment and descriptors through a socket to this process, and ends as the fork does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import spawned

_PROGRAM = """#!{python} -ISs
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({place!r})
asked = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(door, [b"a"], [0, 1, 2])
door.sendall(json.dumps(asked).encode() + b"\\n")
sys.exit(int(door.makefile().readline()))
"""


@contextmanager
def door(folder: Path) -> Iterator[Path]:
    """The program, in a folder, as long as the block runs."""
    place, program = folder / "door", folder / "python"
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(place))
        ours.listen()
        program.write_text(_PROGRAM.format(python=sys.executable, place=str(place)))
        program.chmod(0o755)
        spawned.begin()
        threading.Thread(target=_serve, args=(ours,), daemon=True).start()
        yield program
        ours.shutdown(socket.SHUT_RDWR)


def _serve(ours: socket.socket) -> None:
    while True:
        try:
            caller, _ = ours.accept()
        except OSError:
            return  # the block has ended
        threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller:
        _, descriptors, _, _ = socket.recv_fds(caller, 1, 3)
        streams = [os.fdopen(number, "rb", buffering=0) for number in descriptors]
        try:
            asked = json.loads(caller.makefile().readline())
            process = spawned.popen(
                [sys.executable, *asked["words"]], stdin=streams[0], stdout=streams[1],
                stderr=streams[2], cwd=asked["folder"], env=asked["environment"],
            )  # fmt: skip
        finally:
            for stream in streams:
                stream.close()
        caller.sendall(b"%d\n" % (process.wait() % 256))
