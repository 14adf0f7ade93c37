"""What a program under test cannot get past: system calls, files and resources. Linux on x86-64 and ARM.

Everything here restricts the calling process for good and is meant for one that is about to become the program.
There are two ways to take the file system away. ``own_root`` gives the process a root of its own (a mount namespace,
through a user namespace where it has no privileges): the interpreter and the system's libraries, read-only, and a
small ``/tmp`` in memory that ends with the process. ``read_only`` uses Landlock: the same files can be read, nothing
can be written. ``no_escape`` filters system calls in both cases: no new process, no socket, no signal to others, no
look into them, no change of limits, mounts, owners or modes; threads are left.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)

_NEW_MOUNTS, _NEW_USERS, _NEW_NETWORK, _NEW_IPC = 0x00020000, 0x10000000, 0x40000000, 0x08000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SPARE_UIDS = range(61184, 65520)
"""Those that systemd keeps for users without a name."""

_SYSTEM_CALLS = """
    fork:57:-1 vfork:58:-1 clone:56:220 clone3:435:435
    kill:62:129 tkill:200:130 tgkill:234:131 rt_sigqueueinfo:129:138 rt_tgsigqueueinfo:297:240
    pidfd_send_signal:424:424 pidfd_open:434:434 pidfd_getfd:438:438
    ptrace:101:117 process_vm_readv:310:270 process_vm_writev:311:271 kcmp:312:272 process_madvise:440:440
    process_mrelease:448:448 prlimit64:302:261 setpriority:141:140 ioprio_set:251:30 prctl:157:167
    sched_setparam:142:118 sched_setscheduler:144:119 sched_setaffinity:203:122 sched_setattr:314:274
    migrate_pages:256:238 move_pages:279:239 fcntl:72:25 ioctl:16:29
    socket:41:198 io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427
    mount:165:40 umount2:166:39 pivot_root:155:41 chroot:161:51 unshare:272:97 setns:308:268
    open_tree:428:428 move_mount:429:429 fsopen:430:430 fsconfig:431:431 fsmount:432:432 fspick:433:433
    mount_setattr:442:442 open_by_handle_at:304:265 name_to_handle_at:303:264 fanotify_init:300:262
    shmget:29:194 shmat:30:196 shmctl:31:195 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192
    msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180
    memfd_create:319:279 memfd_secret:447:447 userfaultfd:323:282 bpf:321:280 perf_event_open:298:241
    add_key:248:217 request_key:249:218 keyctl:250:219
    chmod:90:-1 fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 chown:92:-1 fchown:93:55 lchown:94:-1
    fchownat:260:54 utime:132:-1 utimes:235:-1 futimesat:261:-1 utimensat:280:88 truncate:76:45
    setxattr:188:5 lsetxattr:189:6 fsetxattr:190:7 removexattr:197:14 lremovexattr:198:15 fremovexattr:199:16
    setxattrat:463:463 removexattrat:466:466
    kexec_load:246:104 kexec_file_load:320:294 init_module:175:105 finit_module:313:273 delete_module:176:106
    reboot:169:142 swapon:167:224 swapoff:168:225 acct:163:89 settimeofday:164:170 clock_settime:227:112
    adjtimex:159:171 clock_adjtime:305:266 sethostname:170:161 setdomainname:171:162 quotactl:179:60
    syslog:103:116 personality:135:92 vhangup:153:58
"""
"""Those that are refused or restricted, with their numbers on x86-64 and ARM (from the kernel's tables; -1: none)."""

_OWN_PROCESS = ("kill", "tkill", "tgkill")
"""Allowed for the process itself: abort() needs them."""
_FORBIDDEN_ARGUMENTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "prctl": (0, (_PR_SET_PDEATHSIG,)),
    "fcntl": (1, (8, 10, 15)),  # F_SETOWN, F_SETSIG, F_SETOWN_EX: the kernel would signal another process
    "ioctl": (1, (0x5412, 0x5452, 0x8901, 0x8902)),  # TIOCSTI, FIOASYNC, FIOSETOWN, SIOCSPGRP: the same
}
"""Position and values of an argument that are refused; the call is free otherwise."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD, _X32 = 0x00010000, 0x40000000


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def visible_paths(prefix: str) -> list[str]:
    """What a program may read: the interpreter at ``prefix`` and the system's programs and libraries."""
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"]
    inside_system = any(Path(prefix).is_relative_to(path) for path in system)
    return [path for path in (*system, *([] if inside_system else [prefix])) if os.path.lexists(path)]


def own_root(paths: Sequence[str], disk_mib: int) -> None:
    """Moves into a root directory of its own, without network, with ``paths`` read-only and an empty ``/tmp``.

    A process of root becomes a spare user, where it can after the mounts were made. Raises OSError where the kernel
    or a container's rules do not let it.
    """
    flags = _NEW_MOUNTS | _NEW_NETWORK | _NEW_IPC
    privileged = os.geteuid() == 0 and _LIBC.unshare(flags) == 0
    if not privileged:
        become_spare_user()
        uid, gid = os.getuid(), os.getgid()
        _checked(_LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # or /proc/self would belong to root
        _checked(_LIBC.unshare(flags | _NEW_USERS), "unshare")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{name}").write_text(text)
    os.umask(0o022)
    _mount("none", "/", None, _RECURSIVE | _PRIVATE)
    # By descriptor, since the new root covers a directory that some of them lie in.
    sources = {path: os.open(path, os.O_PATH) for path in (*paths, "/dev/null") if not os.path.islink(path)}
    root = "/etc"  # one that always exists and is none of the sources; it is covered for this process alone
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    os.mkdir(f"{root}/tmp")
    _mount("tmpfs", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, f"size={disk_mib}m,nr_inodes=4096,mode=1777")
    for path in paths:
        if path not in sources:
            os.symlink(os.readlink(path), root + path)
    for path, source in sources.items():
        _bind(source, root + path)
        os.close(source)
    _mount("none", root, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(root)
    _checked(_LIBC.pivot_root(b".", b"."), "pivot_root")
    _checked(_LIBC.umount2(b".", 2), "umount2")
    os.chdir("/tmp")
    if privileged:
        become_spare_user()


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind)]
    _checked(_LIBC.mount(*encoded, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def _bind(source: int, target: str) -> None:
    """Shows the file or directory behind a descriptor at ``target``: a device as it is, anything else read-only."""
    origin = f"/proc/self/fd/{source}"
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(origin):
        Path(target).mkdir(exist_ok=True)
    else:
        Path(target).touch()
    _mount(origin, target, None, _BIND | _RECURSIVE)
    if stat.S_ISCHR(os.stat(origin).st_mode):
        return
    attributes = struct.pack("<QQQQ", _RDONLY | _NOSUID, 0, 0, 0)
    if _LIBC.syscall(442, -100, target.encode(), 0x8000, attributes, ctypes.c_size_t(len(attributes))) != 0:
        kept = os.statvfs(target).f_flag & (_NOSUID | _NODEV | _NOEXEC)  # before Linux 5.12: the top mount only
        _mount("none", target, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | kept)


def become_spare_user() -> None:
    """Turns a process of root into one of a user that nobody else is; others stay who they are."""
    if os.geteuid() == 0:
        uid = _SPARE_UIDS[os.getpid() % len(_SPARE_UIDS)]
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def landlock_version() -> int:
    """The version of the kernel's Landlock interface, 0 where there is none."""
    return max(0, int(_LIBC.syscall(444, None, ctypes.c_size_t(0), 1)))


def read_only(paths: Sequence[str]) -> None:
    """Takes all files away but ``paths``, which can be read and executed. Raises OSError without Landlock."""
    version = landlock_version()
    if not version:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock (Linux 5.13), or it is not enabled")
    rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)  # number of rights over files that this version knows
    everything = struct.pack("<Q", (1 << rights) - 1)
    rules = _checked(_LIBC.syscall(444, everything, ctypes.c_size_t(8), 0), "landlock_create_ruleset")
    for path in (*paths, "/dev/null"):
        source = os.open(path, os.O_PATH)
        allowed = 0b1101 if os.path.isdir(path) else 0b0110 if path == "/dev/null" else 0b0100
        rule = struct.pack("<Qi", allowed, source)
        _checked(_LIBC.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(source)
    os.chdir("/")
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(_LIBC.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)


def filter_code(machine: str, pid: int) -> bytes:
    """The classic BPF program of ``no_escape`` for a kind of machine and a process id."""
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no table of system calls for machine {machine!r}")
    fail, missing = (_RETURN, 0, 0, _FAIL | errno.EPERM), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)
    allow = (_RETURN, 0, 0, _ALLOW)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    code += [(_AT_LEAST, 0, 1, _X32), missing]
    for name, *numbers in re.findall(r"(\w+):(-?\d+):(-?\d+)", _SYSTEM_CALLS):
        number = int(numbers[list(_ARCHITECTURES).index(machine)])
        if number < 0:
            continue
        if name == "clone":
            body = [(_LOAD, 0, 0, 16), (_ANY_BIT, 1, 0, _CLONE_THREAD), fail, allow]
        elif name in _OWN_PROCESS or name == "prlimit64":
            body = [(_LOAD, 0, 0, 16), (_EQUAL, 1, 0, pid if name in _OWN_PROCESS else 0), fail, allow]
        elif name in _FORBIDDEN_ARGUMENTS:
            position, values = _FORBIDDEN_ARGUMENTS[name]
            tests = [line for value in values for line in ((_EQUAL, 0, 1, value), fail)]
            body = [(_LOAD, 0, 0, 16 + 8 * position), *tests, allow]
        else:
            body = [missing if name == "clone3" else fail]  # libraries fall back to clone where clone3 is missing
        code += [(_EQUAL, 0, len(body), number), *body]
    return b"".join(struct.pack("<HBBI", *line) for line in (*code, allow))


def no_escape() -> None:
    """Filters the system calls of this process and of what it executes. Raises OSError where the kernel cannot."""
    code = ctypes.create_string_buffer(filter_code(platform.machine(), os.getpid()))
    program = struct.pack("HxxxxxxP", (len(code) - 1) // 8, ctypes.addressof(code))
    _checked(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    _checked(_LIBC.prctl(_PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


def die_with_parent() -> None:
    """The process is killed when the one that made it ends. Call it after the user was changed."""
    _checked(_LIBC.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def limit_resources(*, cpu_seconds: int, memory_mib: int, disk_mib: int, threads: int, open_files: int) -> None:
    """Limits of this process; ``threads`` counts those of its user, of whom there may be others."""
    limits = {
        resource.RLIMIT_AS: memory_mib * 2**20,
        resource.RLIMIT_FSIZE: disk_mib * 2**20,
        resource.RLIMIT_NPROC: threads,
        resource.RLIMIT_NOFILE: open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for kind, limit in limits.items():
        most = _at_most(kind, limit)
        resource.setrlimit(kind, (most, most))
    # A process is told when its time is up, and killed a second later.
    time = _at_most(resource.RLIMIT_CPU, cpu_seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (time, _at_most(resource.RLIMIT_CPU, cpu_seconds + 1)))


def _at_most(kind: int, limit: int) -> int:
    hard = resource.getrlimit(kind)[1]
    return limit if hard == resource.RLIM_INFINITY else min(limit, hard)


def other_threads(own_root: bool) -> int:
    """How many threads count against this user's limit before a program starts its own.

    None do for a spare user, nor in a user namespace since Linux 5.14, which counts by itself.
    """
    uid, release = os.getuid(), tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if uid == 0 or (own_root and release >= (5, 14)):
        return 0
    mine = [entry.path for entry in os.scandir("/proc") if entry.name.isdigit() and _owner(entry) == uid]
    return sum(map(_threads, mine)) - 1  # this process is the one that becomes the program


def _owner(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_uid
    except FileNotFoundError:  # it ended in the meantime
        return -1


def _threads(process: str) -> int:
    try:
        return len(os.listdir(f"{process}/task"))
    except (FileNotFoundError, ProcessLookupError):
        return 0
