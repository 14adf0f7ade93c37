"""Programs that try to get out or to do harm. Run as a program: tries them all and prints what came of each as JSON."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from spark_megatron.rewards.sandbox import Limits, Sandbox

LIMITS = Limits(cpu_seconds=2, wall_seconds=8, memory_mib=512, disk_mib=8, threads=8, open_files=32, output_kib=64)

PRELUDE = """
import ctypes, fcntl, json, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
secret, folder, parent = {secret!r}, {folder!r}, {parent}
def refused(action, *args, **kwargs):
    try:
        result = action(*args, **kwargs)
    except (OSError, RuntimeError, ValueError, MemoryError):
        return
    print("ESCAPED", action, args, result)
def denied(number, *args):
    if libc.syscall(number, *args) != -1:
        print("ESCAPED system call", number, args)
"""

HELD = {
    "fork": "refused(os.fork)",
    "fork bomb": "for _ in range(5_000): refused(os.fork)",
    "spawn": "refused(os.posix_spawn, '/bin/sh', ['sh'], {})\nrefused(subprocess.run, ['/bin/true'])",
    "multiprocessing": (
        "import multiprocessing\nrefused(multiprocessing.get_context('fork').Process(target=print).start)"
    ),
    "clone": "denied(56, 0x10000000 | 17, 0, 0, 0, 0)\ndenied(435, 0, 0)",
    "thread bomb": """
started, done = 0, threading.Event()
try:
    while started < 200:
        threading.Thread(target=done.wait).start()
        started += 1
except RuntimeError:
    done.set()
if started >= 8: print("ESCAPED", started, "threads")""",
    "read files": """
for path in (secret, folder, "/etc/passwd", "/etc/shadow", "/proc/self/environ", "/proc/1/environ",
             f"/proc/{parent}/environ", f"/proc/{parent}/mem", f"/proc/{parent}/fd/0", "/proc", "/home"):
    refused(os.listdir if os.path.isdir(path) else open, path)""",
    "environment": "if any('TOKEN' in name for name in os.environ): print('ESCAPED', dict(os.environ))",
    "write outside": """
for path in (folder, "/var/tmp", "/dev/shm", "/usr/lib", sys.prefix, os.path.dirname(os.__file__), "/", "/etc", "/run"):
    refused(open, path + "/spark_escape", "w")
    refused(os.mkdir, path + "/spark_escape")
refused(open, secret, "a")""",
    "change files": """
for action, args in ((os.chmod, (0o777,)), (os.utime, ((0, 0),)), (os.truncate, (0,)), (os.chown, (0, 0)),
                     (os.unlink, ()), (os.setxattr, ("user.x", b"x"))):
    refused(action, secret, *args)
    refused(action, sys.executable, *args)""",
    "network": """
refused(socket.socket)
refused(socket.create_connection, ("127.0.0.1", 22), 1)
refused(socket.socket, socket.AF_UNIX)
denied(425, 8, ctypes.create_string_buffer(256))""",
    "signals": """
for target in (parent, os.getppid(), -1, 1):
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        refused(os.kill, target, number)
refused(os.killpg, os.getpgid(0), 0)
denied(234, parent, parent, 9)
refused(os.pidfd_open, parent)
refused(fcntl.fcntl, 0, fcntl.F_SETOWN, parent)
left, right = socket.socketpair()
refused(fcntl.ioctl, left, 0x8901, ctypes.c_int(parent))""",
    "other processes": """
denied(101, 16, parent, 0, 0)
denied(310, parent, 0, 0, 0, 0, 0)
denied(311, parent, 0, 0, 0, 0, 0)
refused(resource.prlimit, parent, resource.RLIMIT_CPU, (1, 1))
refused(os.sched_setaffinity, parent, {0})
refused(os.setpriority, os.PRIO_PROCESS, parent, 19)""",
    "privileges": """
refused(os.setuid, 0)
refused(os.setgid, 0)
if 0 in (os.getuid(), os.geteuid(), os.getgid()):
    print("ESCAPED", os.getuid(), os.getgid())
refused(os.chroot, "/")
denied(272, 0x10000000)
denied(165, b"none", b"/tmp", b"tmpfs", 0, 0)""",
    "kernel": "for number in (298, 321, 323, 250, 246, 175, 169, 304): denied(number, 0, 0, 0, 0, 0)",
    "other architectures": "denied(0x40000000 + 41, 2, 1, 0)",
    "memory": "refused(bytearray, 2**30)\nrefused(os.memfd_create, 'x')\ndenied(29, 0, 1 << 20, 0o1600)",
    "limits": """
for kind in "AS CPU FSIZE NPROC NOFILE".split():
    refused(resource.setrlimit, getattr(resource, f"RLIMIT_{kind}"), (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
refused(lambda: [open("/dev/null") for _ in range(40)])""",
    "descriptors": """
for number in range(3, 512):
    refused(os.fstat, number)""",
    "one large file": """
def fill():
    with open("/tmp/large", "wb") as file:
        for _ in range(32): file.write(bytes(2**20))
refused(fill)""",
    "many files": """
def fill():
    for number in range(20_000): open(f"/tmp/{number}", "w").close()
refused(fill)""",
    "the end of the parent": "libc.prctl(1, 0, 0, 0, 0) == 0 and print('ESCAPED')",
}
"""Each must find every door shut."""

ENDED = {
    "sleeping": ("import time\ntime.sleep(1000)", "timeout"),
    "working": ("while True: pass", "timeout"),
    "deaf": ("import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "timeout"),
    "deaf to all": (
        "import signal, time\n"
        "for number in set(range(1, 65)) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "timeout",
    ),
    "silent": ("import os, time\nos.close(0)\nos.close(1)\nos.close(2)\ntime.sleep(1000)", "timeout"),
    "its own session": (
        "import os, time\nfor leave in (os.setsid, os.setpgrp):\n    try: leave()\n    except OSError: pass\n"
        "time.sleep(1000)",
        "timeout",
    ),
    "busy threads": (
        "import threading\ndef work():\n  while True: pass\nfor _ in range(4): threading.Thread(target=work).start()",
        "timeout",
    ),
    "talking": ("while True: print('x' * 1_000_000)", "output"),
    "allocating": ("x = [0]\nwhile True: x = x + x", "exit"),
    "aborting": ("import os\nos.abort()", "exit"),
    "a segmentation fault": ("import ctypes\nctypes.string_at(0)", "exit"),
}
"""And how each of these ends."""


def _state(file: Path) -> tuple[object, ...]:
    found = file.stat()
    return file.read_text(), found.st_mode, found.st_uid, found.st_mtime_ns, found.st_nlink


def attempt(isolation: Literal["namespaces", "filters"]) -> dict[str, Any]:
    """What each program printed (HELD), how it ended (ENDED), and what is left of them on the machine."""
    os.environ["SPARK_TOKEN"] = "secret"
    sandbox = Sandbox(limits=LIMITS, children=len(ENDED), isolation=isolation)
    before = set(os.listdir("/tmp"))
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret.txt")
        secret.write_text("the tests")
        os.chmod(folder, 0o777)
        os.chmod(secret, 0o666)
        state = _state(secret)
        values = {"secret": str(secret), "folder": folder, "parent": os.getpid()}
        prelude = PRELUDE.format(**values)
        held = {}
        for name, body in HELD.items():
            run = sandbox.run(f"{prelude}\n{body}\nprint('held')")
            held[name] = run.output if (run.end, run.code) == ("exit", 0) else repr(run)
        with ThreadPoolExecutor(len(ENDED)) as pool:
            ends = pool.map(lambda item: sandbox.run(item[0]).end, ENDED.values())
            ended = dict(zip(ENDED, ends, strict=True))
        same = _state(secret) == state
    sandbox.close()
    left = sorted(
        name for name in set(os.listdir("/tmp")) - before if name.isdigit() or name in ("large", "spark_escape")
    )
    return {"held": held, "ended": ended, "same": same, "left": left}


if __name__ == "__main__":
    json.dump(attempt(sys.argv[1]), sys.stdout)  # type: ignore[arg-type]
