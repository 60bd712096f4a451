"""A sandbox for programs that a model wrote.

The process may compute, read Python's own files and write into a folder of its own. Landlock denies all other files; a
seccomp filter denies all system calls but a short list: no network, no further processes, no signals. Both are enforced
by the kernel, for root too, and need neither root nor namespaces. The parent limits time, threads and files.
"""

import ctypes
import errno
import functools
import inspect
import marshal
import math
import os
import platform
import secrets
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mars.errors import MarsError

START_SECONDS = 60.0  # for the process to start; the program's own time begins after that
TICK_SECONDS = 0.05  # between two checks of what a program uses
TAIL = 2000  # characters of a program's output that are kept

_READY = b"ready\n"
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the kernel's names for them (AUDIT_ARCH)

_ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, lseek 8 62, close 3 57, dup 32 23,
dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, stat 4 -,
fstat 5 80, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
readlink 89 -, readlinkat 267 78, getdents64 217 61, getcwd 79 17, chdir 80 49, unlink 87 -, unlinkat 263 35,
rename 82 -, renameat 264 38, renameat2 316 276, ftruncate 77 46, fsync 74 82, umask 95 166, mmap 9 222,
munmap 11 215, mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, time 201 -, gettimeofday 96 169,
clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, times 100 153, alarm 37 -,
getitimer 36 102, setitimer 38 103, pause 34 -, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139,
rt_sigpending 127 136, rt_sigsuspend 130 133, rt_sigtimedwait 128 137, sigaltstack 131 132, restart_syscall 219 128,
getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
uname 63 160, sysinfo 99 179, getrusage 98 165, futex 202 98, set_robust_list 273 99, rseq 334 293, sched_yield 24 124,
sched_getaffinity 204 123, getcpu 309 168, getrandom 318 278, exit 60 93, exit_group 231 94
"""  # system calls and their numbers on x86_64 and aarch64

_IF: dict[tuple[int | None, int | None], tuple[int, int, tuple[int, ...]]] = {
    # Opening to read and yet truncating is a way round Landlock before its third version.
    (2, None): (1, os.O_TRUNC | 3, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2)),  # open
    (257, 56): (2, os.O_TRUNC | 3, (0, 1, 2, os.O_TRUNC | 1, os.O_TRUNC | 2)),  # openat
    # Threads as glibc and musl make them; no processes, no namespaces.
    (56, 220): (0, 0xFFBFFFFF, (0x3D0F00,)),  # clone
    # Copies of descriptors and their flags; F_SETOWN and F_SETSIG would send signals.
    (72, 25): (1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030)),  # fcntl
    (16, 29): (1, 0xFFFFFFFF, (0x5401, 0x5450, 0x5451)),  # ioctl: TCGETS, FIONCLEX, FIOCLEX
}  # calls that depend on an argument: their numbers; which argument, its bits that matter, their allowed values


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use."""

    cpu_seconds: float = 5.0
    wall_seconds: float = 20.0
    memory: int = 1 << 30  # bytes of address space
    disk: int = 16 << 20  # bytes in its folder, and in each file
    files: int = 64  # in its folder, and open at once
    threads: int = 64
    output: int = 16 << 20  # bytes printed


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Outcome:
    passed: bool  # it ran to its last line, and nothing was raised
    reason: str  # ``passed``, ``timed out``, ``failed: AssertionError: …``, ``killed: memory``
    output: str  # the end of what it printed, and of the traceback


def check() -> None:
    """Raise unless the sandbox works on this machine."""
    outcome = run("import hashlib, random, re")
    if not outcome.passed:
        raise MarsError(f"a harmless program does not run in the sandbox ({outcome.reason}): {_last(outcome.output)}")


def run(program: str, limits: Limits = LIMITS) -> Outcome:
    """Run a program until it ends or exceeds a limit; its folder is removed."""
    abi, filter_ = _landlock_abi(), _filter()
    # A program may end early in many ways. Only one that reached its end sends this back.
    nonce = secrets.token_bytes(16)
    mine, theirs = os.pipe()
    with (
        os.fdopen(mine, "rb") as reports,
        os.fdopen(theirs, "wb") as pen,
        tempfile.TemporaryDirectory(prefix="mars-") as folder,
        tempfile.TemporaryFile() as stdin,
    ):
        order = (program, pen.fileno(), os.getpid(), folder, _rlimits(limits), *_rights(abi), filter_)
        stdin.write(marshal.dumps(order) + nonce)
        stdin.seek(0)
        with subprocess.Popen(
            [sys.executable, "-sSPB", "-c", _source()],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[pen.fileno()],
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        ) as process:
            try:
                pen.close()
                excess, report, output = _follow(process, reports.fileno(), Path(folder), limits)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    printed = output.decode(errors="replace")[-TAIL:]
    if not report.startswith(_READY):
        why = excess or _last(printed) or f"exit code {process.returncode}"
        raise MarsError(f"the sandbox does not start ({why}): it needs Linux 5.13 or newer with Landlock and seccomp")
    reason = "passed" if report.endswith(nonce) else excess or _reason(report, process.returncode)
    return Outcome(reason == "passed", reason, printed)


def run_all(
    programs: Sequence[str],
    limits: Limits = LIMITS,
    workers: int | None = None,
    on_done: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Run many, ``workers`` at a time (None: one for each core); outcomes in the programs' order.

    ``on_done`` gets each program's number and outcome when it is done, in the caller's thread.
    """
    _landlock_abi()
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        numbers = {pool.submit(run, program, limits): number for number, program in enumerate(programs)}
        try:
            for future in as_completed(numbers):
                number = numbers[future]
                outcomes[number] = future.result()
                if on_done is not None:
                    on_done(number, outcomes[number])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [outcomes[number] for number in range(len(programs))]


def _inside() -> None:
    """The new process: lock up, then run the program. All it has of ours is the source of this and of `_lock`."""
    import marshal
    import os
    import sys
    from types import ModuleType

    with open(0, "rb", closefd=False) as stdin:
        program, report, *rules = marshal.load(stdin)
        secret = [stdin.read()]
    os.close(0)
    os.open("/dev/null", os.O_RDONLY)  # becomes number 0
    _lock(*rules)

    # Not "__main__": as in HumanEval's own harness, what stands under that condition does not run.
    module = sys.modules["program"] = ModuleType("program")
    spare, tell = bytearray(1 << 20), os.write
    tell(report, b"ready\n")
    try:
        code = compile(program, "<program>", "exec", dont_inherit=True)
        # The program can see this frame's variables. While it runs, the secret is in none: only on the frame's stack.
        tell(report, (secret.pop(), exec(code, module.__dict__))[0])  # type: ignore[func-returns-value]
    except BaseException as error:
        del spare  # room to say that there is no more memory
        tell(report, type(error).__name__.encode())
        tell(report, f": {error!s:.500}".encode(errors="replace"))
        if error.__traceback__ is not None:
            error = error.with_traceback(error.__traceback__.tb_next)
        sys.stdout.flush()
        sys.__excepthook__(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
        finally:
            os._exit(0)  # whatever threads there are


def _lock(parent: int, folder: str, limits: dict[str, int], attributes: bytes, write: int, filter_: bytes) -> None:
    """Give up all rights of this process but to compute, to read Python's files and to write in the folder."""
    import ctypes
    import os
    import resource
    import struct
    import sys

    libc, number = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong

    def must(what: str, result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)
        return result

    must("prctl", libc.prctl(1, number(9), number(0), number(0), number(0)))  # PDEATHSIG: it dies with its parent
    if os.getppid() != parent:
        os._exit(1)
    try:
        with open("/proc/self/oom_score_adj", "w") as score:  # noqa: PTH123
            score.write("1000")  # if memory runs out, this process is killed first, not the one with the model
    except OSError:
        pass
    for name, limit in limits.items():
        most = resource.getrlimit(getattr(resource, name))[1]
        allowed = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(getattr(resource, name), (allowed, allowed))
    must("capset", libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)))  # not even root's capabilities
    must("prctl", libc.prctl(38, number(1), number(0), number(0), number(0)))  # NO_NEW_PRIVS

    rules = must("Landlock", libc.syscall(number(444), attributes, number(len(attributes)), number(0)))
    readable = {f"{sys.base_prefix}/lib", f"{sys.base_exec_prefix}/lib", *sys.path}
    readable |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/dev/urandom"}
    for path, rights in [*((each, 0b1100) for each in readable), ("/dev/null", 0b0110), (folder, write)]:
        try:
            opened = os.open(path, os.O_PATH)
        except OSError:
            continue  # not every system has them all
        rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & 0b0110, opened)  # noqa: PTH112
        must("Landlock", libc.syscall(number(445), number(rules), number(1), rule, number(0)))
        os.close(opened)
    must("Landlock", libc.syscall(number(446), number(rules), number(0)))
    os.close(rules)

    code = ctypes.create_string_buffer(filter_, len(filter_))
    fields = struct.pack("HP", len(filter_) // 8, ctypes.addressof(code))
    must("seccomp", libc.prctl(22, number(2), fields, number(0), number(0)))


def _follow(
    process: subprocess.Popen[bytes], reports: int, folder: Path, limits: Limits
) -> tuple[str | None, bytes, bytes]:
    """Wait until it ends or exceeds a limit: returns the limit, what it reported, and what it printed."""
    assert process.stdout is not None
    printed = process.stdout.fileno()
    heard = {reports: bytearray(), printed: bytearray()}
    end, next_look, excess = time.monotonic() + START_SECONDS, 0.0, None
    ended = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for each in (reports, printed, ended):
                selector.register(each, selectors.EVENT_READ)
            while excess is None:
                ready = {key.fd for key, _ in selector.select(TICK_SECONDS)}
                if ready == {ended}:
                    break  # and there is nothing left to read
                now = time.monotonic()
                for each in ready - {ended}:
                    data = os.read(each, 1 << 16)
                    if each == reports and data and not heard[each]:
                        end = now + limits.wall_seconds
                    heard[each] += data
                    if not data:
                        selector.unregister(each)
                if max(map(len, heard.values())) > limits.output:
                    excess = "killed: output"
                elif now > end:
                    excess = "timed out"
                elif now > next_look:
                    excess, next_look = _excess(process.pid, folder, limits), now + TICK_SECONDS
    finally:
        os.close(ended)
    return excess, bytes(heard[reports]), bytes(heard[printed])


def _excess(process: int, folder: Path, limits: Limits) -> str | None:
    """The limit that a process exceeds at the moment."""
    with suppress(OSError):  # the process may just have ended, a file may just have gone
        if time.clock_gettime((~process << 3) | 2) > limits.cpu_seconds:  # its clock, as clock_getcpuclockid has it
            return "timed out"
        if len(list(Path(f"/proc/{process}/task").iterdir())) > limits.threads:
            return "killed: threads"
    sizes = []
    for file in folder.iterdir():
        with suppress(OSError):
            sizes.append(file.lstat().st_blocks * 512)
        if len(sizes) > limits.files or sum(sizes) > limits.disk:
            return "killed: disk"
    return None


def _reason(report: bytes, code: int) -> str:
    """Why it did not pass. The program itself wrote the report."""
    error = " ".join(report.removeprefix(_READY).decode(errors="replace").split())[:300]
    if error:
        return "killed: memory" if error.startswith("MemoryError") else f"failed: {error.removesuffix(':')}"
    if code >= 0:
        return f"failed: ended early with exit code {code}"
    return f"killed: {signal.Signals(-code).name}"


@functools.cache
def _source() -> str:
    return "\n".join([inspect.getsource(_lock), inspect.getsource(_inside), "_inside()"])


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _environment(folder: str) -> dict[str, str]:
    """Nothing of our own but the path of shared libraries; hashes are fixed, so that sets have one order."""
    libraries = {"LD_LIBRARY_PATH": os.environ["LD_LIBRARY_PATH"]} if "LD_LIBRARY_PATH" in os.environ else {}
    fixed = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LANG": "C.UTF-8", "TZ": "UTC", "MALLOC_ARENA_MAX": "2"}
    return libraries | fixed | {"HOME": folder, "TMPDIR": folder}


def _rlimits(limits: Limits) -> dict[str, int]:
    return {
        "RLIMIT_AS": limits.memory,
        "RLIMIT_CPU": math.ceil(limits.cpu_seconds) + 1,  # in case the parent is gone
        "RLIMIT_FSIZE": limits.disk,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_CORE": 0,
    }


@functools.cache
def _landlock_abi() -> int:
    """The version of Landlock that the kernel has; raises where there is none."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise MarsError(
            f"programs that a model wrote are run on Linux only, on x86_64 or aarch64, not on {platform.system()} "
            f"{platform.machine()}: elsewhere nothing here keeps them from doing harm"
        )
    libc, number = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong
    abi = libc.syscall(number(444), None, number(0), number(1))
    if abi < 1:
        off = ctypes.get_errno() == errno.EOPNOTSUPP
        raise MarsError(
            "this kernel has no Landlock, which keeps programs that a model wrote from your files: "
            + ("add landlock to the kernel's lsm= option" if off else "use Linux 5.13 or newer")
            + ", and in a container, one whose seccomp profile allows it"
        )
    return int(abi)


def _rights(abi: int) -> tuple[bytes, int]:
    """The ruleset's attributes, which name all that is forbidden unless a rule allows it; the rights in the folder.

    Files can be made, changed and removed there; there are no folders in it, which others would have to walk.
    """
    files = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    network, scopes = (0b11 if abi >= 4 else 0), (0b11 if abi >= 6 else 0)
    write_read_list_remove_make_truncate = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 5 | 1 << 8 | 1 << 14
    return struct.pack("QQQ", files, network, scopes), files & write_read_list_remove_make_truncate


@functools.cache
def _filter() -> bytes:
    """The seccomp filter. Calls that are not allowed fail with ENOSYS, as in a kernel without them."""
    machine = platform.machine()
    column = list(_MACHINES).index(machine)
    load, equal, and_, return_ = 0x20, 0x15, 0x54, 0x06
    allow, missing, kill = 0x7FFF0000, 0x00050000 | errno.ENOSYS, 0x80000000
    steps = [(load, 0, 0, 4), (equal, 1, 0, _MACHINES[machine]), (return_, 0, 0, kill), (load, 0, 0, 0)]
    for call in _ALLOWED.split(","):
        if (number := call.split()[1 + column]) != "-":
            steps += [(equal, 0, 1, int(number)), (return_, 0, 0, allow)]
    for numbers, (argument, bits, values) in _IF.items():
        if (wanted := numbers[column]) is not None:
            steps += [(equal, 0, 3 + 2 * len(values), wanted), (load, 0, 0, 16 + 8 * argument), (and_, 0, 0, bits)]
            for value in values:
                steps += [(equal, 0, 1, value), (return_, 0, 0, allow)]
            steps.append((return_, 0, 0, missing))
    steps.append((return_, 0, 0, missing))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
