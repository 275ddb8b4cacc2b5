"""Scripts in processes of their own, forked from one that has imported what they need.

To import torch, Dynamo, Triton and transformers takes as long as most of the scripts. What is
forked has the interpreter's Triton, nothing of the test's, and ends with its script.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

_SERVE = """
import json, os, sys, tempfile, traceback, types
import torch, torch._dynamo, torch.export._trace, transformers.modeling_utils, triton


def run(job):
    os.chdir(job["folder"])
    os.environ.update(job["environment"])
    sys.path[:0] = filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["-c", *job["arguments"]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(job["script"], "<script>", "exec"), vars(main))
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    files = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        code = run(json.loads(line))
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = [(file.seek(0), file.read())[1] for file in files]
    print(json.dumps([code, *printed]), file=answers, flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    """It ends when its standard input does, with this process."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _SERVE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip


def run_script(script: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """What a script prints, which has to end well."""
    job = {
        "script": script, "arguments": arguments, "folder": str(folder or Path.cwd()),
        "environment": {**os.environ, **environment, "TRITON_INTERPRET": "1"},
    }  # fmt: skip
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    print(json.dumps(job), file=server.stdin, flush=True)
    code, printed, complained = json.loads(server.stdout.readline())
    assert code == 0, complained
    return printed
