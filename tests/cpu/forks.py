"""Scripts in processes of their own, forked from one that has imported what they need.

To import torch, Dynamo, Triton and transformers takes as long as most of the scripts. What is
forked has the interpreter's Triton, nothing of the test's, and ends with its script.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from fusion_advisor.support.forkserver import Forks

_SERVE = """
import json, os, sys, traceback, types
import torch, torch._dynamo, torch.export._trace, transformers.modeling_utils, triton
from fusion_advisor.support.forkserver import end_with_parent, serve


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


def work(asked, *outputs):
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    code = run(json.load(os.fdopen(asked)))
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


end_with_parent()
serve(int(sys.argv[1]), work)
"""


@functools.cache
def _forks() -> Forks:
    """They end with this process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return Forks([sys.executable, "-W", "ignore", "-c", _SERVE], environment)


def run_script(script: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """What a script prints, which has to end well."""
    job = {
        "script": script, "arguments": arguments, "folder": str(folder or Path.cwd()),
        "environment": {**os.environ, **environment, "TRITON_INTERPRET": "1"},
    }  # fmt: skip
    with ExitStack() as stack:
        asked, printed, complained = (
            stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)
        )
        json.dump(job, asked)
        asked.seek(0)
        code = _forks().fork(*(file.fileno() for file in (asked, printed, complained))).wait()
        printed.seek(0), complained.seek(0)
        assert code == 0, complained.read()
        return printed.read()
