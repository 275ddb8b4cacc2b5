"""Commands that shells start, run in forks of the processes of `spawned`.

`Door` writes the programs that a shell finds as `fusion-advisor` and `python`: they hand what they
were called with, and their own descriptors, through a socket to this process, and end as the fork
does.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import threading
from pathlib import Path

from . import spawned

_PROGRAM = """#!{python} -ISs
import json, os, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({place!r})
words = [*{words!r}, *sys.argv[1:]]
asked = {{"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}}
socket.send_fds(door, [b"a"], [0, 1, 2])
door.sendall(json.dumps(asked).encode() + b"\\n")
sys.exit(int(door.makefile().readline()))
"""


class Door:
    """In a folder: the socket, and the programs beside it. Ends with `close`."""

    def __init__(self, folder: Path) -> None:
        place = folder / "door"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(place))
        self._socket.listen()
        for name, words in (("fusion-advisor", ["-m", "fusion_advisor"]), ("python", [])):
            program = folder / name
            program.write_text(
                _PROGRAM.format(python=sys.executable, place=str(place), words=words)
            )
            program.chmod(program.stat().st_mode | stat.S_IXUSR)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return  # closed
            threading.Thread(target=_answer, args=(caller,), daemon=True).start()


def _answer(caller: socket.socket) -> None:
    with caller:
        _, descriptors, _, _ = socket.recv_fds(caller, 1, 3)
        streams = [os.fdopen(number, "rb", buffering=0) for number in descriptors]
        try:
            asked = json.loads(caller.makefile().readline())
            code = spawned.popen(
                [sys.executable, *asked["words"]], stdin=streams[0], stdout=streams[1],
                stderr=streams[2], cwd=asked["folder"], env=asked["environment"],
            ).wait()  # fmt: skip
        finally:
            for stream in streams:
                stream.close()
        caller.sendall(b"%d\n" % (code % 256))
