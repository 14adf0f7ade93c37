"""Starts programs under test behind ``walls``, one after the other, and reports how each ended.

Run as a module only. A request is a line of JSON on stdin, ``Request`` as a mapping, and so is the reply: "end" is
"exit" (with "code"; negative: the signal), "timeout", "output" (more of it than allowed) or "setup" (with "reason": the
program was not started). "output" is base64: what the program wrote, or its values where it has expressions.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from spark_megatron.rewards import walls

Isolation = Literal["namespaces", "filters", "none"]


@dataclass(frozen=True)
class Request:
    """One run of a program; the limits are those of ``sandbox.Limits``."""

    isolation: Isolation
    program: str
    stdin: str
    expressions: list[str] | None
    wall_seconds: float
    cpu_seconds: int
    memory_mib: int
    disk_mib: int
    threads: int
    open_files: int
    output_kib: int


def run(request: Request, bootstrap: str) -> dict[str, Any]:
    """Starts the program, waits for its end and reports it; nothing of it is left then."""
    output, program_end = os.pipe()
    trouble, report = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _become_program(request, bootstrap, program_end)
        except BaseException as error:  # noqa: BLE001 - this process must not return into the launcher's loop
            os.write(report, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(127)
    os.close(program_end)
    os.close(report)
    try:
        reason = os.read(trouble, 65536)  # ends when the interpreter is executed
        if reason:
            os.waitpid(pid, 0)
            return {"end": "setup", "reason": reason.decode(errors="replace")}
        return _watch(pid, output, request)
    finally:
        os.close(output)
        os.close(trouble)


def _watch(pid: int, output: int, request: Request) -> dict[str, Any]:
    deadline, limit = time.monotonic() + request.wall_seconds, request.output_kib * 1024
    written, end, status, usage, is_open = b"", "exit", 0, None, True
    while usage is None:
        if not is_open:
            time.sleep(0.002)
        ready = select.select([0, output] if is_open else [0], [], [], 0.05 if is_open else 0)[0]
        if output in ready:
            part = os.read(output, 65536)
            written, is_open = written + part, bool(part)
        if 0 in ready:  # the verifier is gone: it never sends anything before the reply
            end = "abandoned"
        elif len(written) > limit:
            end = "output"
        elif time.monotonic() > deadline:
            end = "timeout"
        if end != "exit":
            _end_group(pid)
        found, status, spent = os.wait4(pid, 0 if end != "exit" else os.WNOHANG)
        usage = spent if found else None
    _end_group(pid)
    if end == "exit":
        written += _rest(output, limit + 1 - len(written))
        end = "output" if len(written) > limit else end
    code, seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    if end == "exit" and (code == -signal.SIGXCPU or (code == -signal.SIGKILL and seconds >= request.cpu_seconds)):
        end = "timeout"
    return {"end": end, "code": code, "output": base64.b64encode(written[:limit]).decode()}


def _end_group(pid: int) -> None:
    """Kills a program and, without isolation, the processes that it made and that stayed in its group."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _rest(output: int, most: int) -> bytes:
    """What is still in the pipe of a program that has ended."""
    os.set_blocking(output, False)
    written = b""
    while len(written) < most:
        try:
            part = os.read(output, most - len(written))
        except BlockingIOError:  # someone else holds the other end: only without isolation
            break
        if not part:
            break
        written += part
    return written


def _become_program(request: Request, bootstrap: str, output: int) -> None:
    os.setsid()
    source = _file(json.dumps({"program": request.program, "expressions": request.expressions}))
    stdin, nothing = _file(request.stdin), os.open("/dev/null", os.O_RDWR)
    # Away from the numbers that are about to be given out.
    source, stdin, nothing, output = (_moved(number) for number in (source, stdin, nothing, output))
    stdout = output if request.expressions is None else nothing
    for number, target in ((stdin, 0), (stdout, 1), (nothing, 2), (source, 3), (output, 4)):
        os.dup2(number, target)
    if request.expressions is None:
        os.close(4)
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, this is what the kernel ends
    prefix, interpreter = sys.base_prefix, os.path.realpath(sys.executable)
    others = walls.other_threads(own_root=request.isolation == "namespaces")
    if request.isolation == "namespaces":
        walls.own_root(walls.visible_paths(prefix), request.disk_mib)
    elif request.isolation == "filters":
        walls.become_spare_user()
        walls.read_only(walls.visible_paths(prefix))
    walls.die_with_parent()
    walls.limit_resources(
        cpu_seconds=request.cpu_seconds,
        memory_mib=request.memory_mib,
        disk_mib=request.disk_mib,
        threads=request.threads + others,
        open_files=request.open_files,
    )
    if request.isolation != "none":
        walls.no_escape()
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
    os.execve(interpreter, [interpreter, "-I", "-S", "-B", "-X", "utf8", "-c", bootstrap], clean)


def _file(text: str) -> int:
    """A file in memory that holds ``text``, at its beginning."""
    number = os.memfd_create("text")
    with open(number, "wb", closefd=False) as file:
        file.write(text.encode(errors="surrogatepass"))
    os.lseek(number, 0, os.SEEK_SET)
    return number


def _moved(number: int) -> int:
    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 10)


def main() -> None:
    """Answers requests until stdin closes."""
    bootstrap = (Path(__file__).parent / "program.py").read_text(encoding="utf-8")
    for line in sys.stdin:
        print(json.dumps(run(Request(**json.loads(line)), bootstrap)), flush=True)


if __name__ == "__main__":
    main()
