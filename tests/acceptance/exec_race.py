"""Race two `meshpoint exec --resume` repeatedly; print the exit codes of each trial as JSON.

Children are forked from this process, which has imported all that they need. The winner waits in
its last step until the other one has ended.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import IO

from meshpoint.cli import main

IMPORTS = (
    "meshpoint.adapters.sql",
    "meshpoint.adapters.telemetry.providers",
    "meshpoint.cli.app",
    "meshpoint.exec.attempt",
    "meshpoint.exec.checkpoint_file",
    "rich.table",
    "sqlalchemy.dialects.sqlite.aiosqlite",
)

GATE_CODE = """    import asyncio, os
    await asyncio.to_thread(os.read, int(os.environ["GATE_CODE"]), 1)
"""


def fork_exec(arguments: list[str], start_pipe: int, errors: IO[bytes]) -> int:
    """Fork a process that runs `meshpoint exec` once `start_pipe` is readable; return its pid."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(errors.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.read(start_pipe, 1)
            main(["exec", "flow:flow", "--input", "3", *arguments])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return pid


def wait_for_exit_code(pid: int = -1) -> int:
    """Exit code of the next child that ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_trial() -> tuple[list[int], str]:
    """Run one race; return both exit codes and the error line of the refused process."""
    start_reader, start = os.pipe()
    gate, open_gate = os.pipe()
    os.environ["GATE_CODE"] = str(gate)
    with tempfile.TemporaryFile() as errors:
        for _ in range(2):
            fork_exec(["--resume"], start_reader, errors)
        os.write(start, b"12")
        codes = [wait_for_exit_code()]
        os.write(open_gate, b"12")
        codes.append(wait_for_exit_code())
        errors.seek(0)
        refusal = next(
            (
                line
                for line in errors.read().decode().splitlines()
                if line.startswith("error: session")
            ),
            "",
        )
    for handle in (start_reader, start, gate, open_gate):
        os.close(handle)
    return codes, refusal


if __name__ == "__main__":
    for name in IMPORTS:
        import_module(name)
    gc.freeze()  # children then copy no pages to collect garbage
    source = Path("flow.py")
    gate, start = os.pipe()
    os.write(start, b"1")
    assert wait_for_exit_code(fork_exec([], gate, sys.stderr.buffer)) == 4
    source.write_text(
        source.read_text().replace('    ran("rate")\n', f'    ran("rate")\n{GATE_CODE}')
    )
    trials = [run_trial() for _ in range(int(sys.argv[1]))]
    print(
        json.dumps(
            {
                "codes": [codes for codes, _ in trials],
                "refusals": [refusal for _, refusal in trials],
            }
        )
    )
