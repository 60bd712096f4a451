"""Programs that a model might write: what passes, what is refused, and that nothing remains of any."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mars.errors import MarsError
from mars.evaluation import sandbox
from mars.evaluation.sandbox import Limits, Outcome, run, run_all

try:
    sandbox._landlock_abi()
except MarsError as error:
    pytest.skip(str(error), allow_module_level=True)

SHORT = Limits(cpu_seconds=0.3, wall_seconds=1.5)
HUMAN_EVAL = """
from typing import List

def has_close_elements(numbers: List[float], threshold: float) -> bool:
    ordered = sorted(numbers)
    return any(b - a < threshold for a, b in zip(ordered, ordered[1:]))

def check(candidate):
    assert candidate([1.0, 2.0, 3.9, 4.0, 5.0, 2.2], 0.3) == True
    assert candidate([1.0, 2.0, 5.9, 4.0, 5.0], 0.8) == False

check(has_close_elements)
"""


@pytest.fixture(autouse=True)
def nothing_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After every test: no process, and nothing in the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    yield
    assert list(folder.iterdir()) == []
    assert psutil.Process().children(recursive=True) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def refused(statements: str, *codes: int) -> Outcome:
    """Passes if the statements raise an error of the system, with one of these numbers."""
    body = textwrap.indent(statements, "    ")
    check = f"assert error.errno in {codes}, error" if codes else "pass"
    return run(f"import os\ntry:\n{body}\nexcept OSError as error:\n    {check}\nelse:\n    assert False, 'allowed'\n")


# Good programs


def test_a_good_program_passes() -> None:
    assert run(HUMAN_EVAL) == Outcome(True, "passed", "")
    sandbox.check()


def test_the_standard_library_is_there() -> None:
    names = (
        "abc, ast, asyncio, base64, bisect, bz2, calendar, cmath, collections, contextlib, copy, ctypes, dataclasses, "
        "datetime, decimal, enum, fractions, functools, hashlib, heapq, html, io, itertools, json, lzma, math, "
        "multiprocessing, operator, os, pathlib, random, re, secrets, shutil, socket, sqlite3, statistics, string, "
        "struct, subprocess, sys, tempfile, textwrap, threading, time, typing, unicodedata, unittest, uuid, zlib"
    )
    program = f"""
import {names}
assert hashlib.sha256(b"a").hexdigest().startswith("ca978112") and hashlib.md5(b"a").hexdigest().startswith("0cc175b9")
assert 0 <= random.random() < 1 and len(secrets.token_bytes(4)) == 4
time.sleep(0.001)
@dataclasses.dataclass
class Point:
    x: typing.ClassVar[int] = 1
    y: int = 2
assert Point() == Point(2) and copy.deepcopy(Point()) == Point()
"""
    assert run(program).reason == "passed"


def test_ordinary_things_work_in_its_folder() -> None:
    program = """
import os, tempfile
assert os.listdir() == []
with open("a", "w") as file:
    file.write("x")
with open("a", "a") as file:
    file.write("y")
os.rename("a", "b")
assert open("b").read() == "xy" and os.listdir() == ["b"]
with tempfile.NamedTemporaryFile("w+") as file:
    print("z", file=file, flush=True)
with open(os.devnull, "w") as nothing:
    print("z", file=nothing)
"""
    assert run(program).reason == "passed"


def test_threads_and_alarms_work() -> None:
    program = """
import signal, time
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(8) as pool:
    assert sum(pool.map(abs, range(100))) == 4950
class Late(Exception): pass
def late(*_): raise Late
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.01)
try:
    time.sleep(5)
except Late:
    pass
else:
    raise AssertionError
"""
    assert run(program).reason == "passed"


def test_main_blocks_do_not_run_as_in_the_reference() -> None:
    assert run("if __name__ == '__main__':\n    raise ValueError").reason == "passed"


def test_a_daemon_thread_does_not_hold_it_up() -> None:
    start = time.monotonic()
    forever = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()"
    assert run(forever).reason == "passed"
    assert time.monotonic() - start < 10


def test_sets_have_the_same_order_in_every_run() -> None:
    assert len({run("print({str(i) for i in range(50)})").output for _ in range(3)}) == 1


# Failing programs


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 + 1 == 3", "failed: AssertionError"),
        ("assert False, 'one\\ntwo'", "failed: AssertionError: one two"),
        ("def f(:", "failed: SyntaxError: invalid syntax (<program>, line 1)"),
        ("x = '\\0'\n\0", "failed: "),
        ("'\ud800'", "failed: UnicodeEncodeError: "),
        ("import numpy", "failed: ModuleNotFoundError: No module named 'numpy'"),
        ("def f(): return f()\nf()", "failed: RecursionError: "),
        ("input()", "failed: EOFError: "),
        ("print('passed'); raise ValueError('passed')", "failed: ValueError: passed"),
        ("class E(Exception):\n    def __str__(self): raise KeyError\nraise E", "failed: E"),
        ("raise BaseException('x' * 10**6)", "failed: BaseException: xxx"),
    ],
)
def test_failures_say_why(program: str, reason: str) -> None:
    outcome = run(program)
    assert not outcome.passed and outcome.reason.startswith(reason) and len(outcome.reason) < 400


def test_the_output_shows_where_it_failed() -> None:
    output = run("print('before')\n\ndef check():\n    assert 0\n\ncheck()").output
    assert output.startswith("before\nTraceback") and 'File "<program>", line 4, in check' in output
    assert "_inside" not in output


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "raise SystemExit",
        "import os; os._exit(0)",
        "print('passed'); import os; os._exit(0)",
        "import os; [os.write(fd, b'passed') for fd in (1, 2)]; os._exit(0)",
        "import os; os.closerange(0, 100)",
        "import sys; sys.exit = sys.settrace = None; sys.modules.clear(); raise SystemExit(0)",
        "import ctypes; ctypes.CDLL(None).exit(0)",
        "import atexit; atexit._run_exitfuncs(); import os; os._exit(0)",
        "import threading, os; threading.Thread(target=os._exit, args=(0,)).start()\nwhile True: pass",
    ],
)
def test_ending_early_is_not_passing(program: str) -> None:
    outcome = run(program + "\nassert False")
    assert not outcome.passed and outcome.reason.startswith("failed: ")


def test_the_secret_is_not_in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not to be found through the frames, the collector, or open files; what does not hide is."""
    monkeypatch.setattr(secrets, "token_bytes", lambda size: b"secret" * 2 + b"1234")
    program = """
import gc, os, sys
plain = b"plain" * 3 + b"5"
found, seen = set(), set()
def look(thing, depth):
    if id(thing) in seen or depth > 6: return
    seen.add(id(thing))
    if isinstance(thing, (bytes, bytearray)) and len(thing) == 16: found.add(bytes(thing))
    for each in gc.get_referents(thing): look(each, depth + 1)
frame = sys._getframe()
while frame:
    for values in (frame.f_locals, frame.f_globals, frame.f_code.co_consts, frame): look(values, 0)
    frame = frame.f_back
for each in gc.get_objects(): look(each, 5)
for fd in range(64):
    for way in (os.read, lambda fd, n: os.pread(fd, n, 0)):
        try: found.add(way(fd, 10**6)[-16:])
        except OSError: pass
print(*(each.hex() for each in found if b"secret" in each or b"plain" in each))
"""
    assert bytes.fromhex(run(program).output) == b"plain" * 3 + b"5"


# Time, memory, disk, output


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        "10 ** 10 ** 10",
        "import re; re.match('(a+)+$', 'a' * 100 + 'b')",
    ],
)
def test_endless_loops_time_out(program: str) -> None:
    start = time.monotonic()
    assert run(program, SHORT).reason == "timed out"
    assert time.monotonic() - start < 5


def test_waiting_times_out_too() -> None:
    waiting = Limits(wall_seconds=0.3)
    assert run("import time; time.sleep(60)", waiting).reason == "timed out"
    assert run("import os; os.closerange(0, 100)\nimport time; time.sleep(60)", waiting).reason == "timed out"
    assert run("import os; r, w = os.pipe(); os.read(r, 1)", waiting).reason == "timed out"


def test_the_cpu_limit_holds_when_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_excess", lambda *_: None)
    monkeypatch.setattr(sandbox, "_rlimits", lambda limits: {"RLIMIT_CPU": 1})
    assert run("while True: pass").reason == "killed: SIGKILL"


@pytest.mark.parametrize(
    "program",
    [
        "x = [0] * (1 << 34)",
        "x = bytearray(1 << 31)",
        "x = []\nwhile True: x.append(bytearray(1 << 20))",
        "x = ()\nwhile True: x = (x, x)",
        "import mmap\nx = []\ntry:\n    while 1: x.append(mmap.mmap(-1, 1 << 20))\nexcept OSError: raise MemoryError",
    ],
)
def test_huge_allocations_end_it(program: str) -> None:
    assert run(program, Limits(memory=1 << 26)).reason == "killed: memory"


def test_deep_recursion_ends_it() -> None:
    program = "import sys; sys.setrecursionlimit(10**9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())"
    assert run(program, Limits(memory=1 << 28)).reason.startswith(("killed: ", "failed: RecursionError"))


def test_many_threads_end_it() -> None:
    program = """
import threading, time
threading.stack_size(1 << 16)
for _ in range(100_000): threading.Thread(target=time.sleep, args=(60,)).start()
"""
    assert run(program).reason == "killed: threads"
    assert run(program.replace("1 << 16", "1 << 26")).reason.startswith("failed: RuntimeError: can't start new thread")


def test_huge_files_end_it() -> None:
    huge = "with open('x', 'wb') as file:\n    while True: file.write(bytes(1 << 20))"
    assert run(huge).reason.startswith("failed: OSError: [Errno 27]")
    assert run("import os\nos.truncate(os.open('x', os.O_CREAT | os.O_RDWR), 1 << 30)").reason.startswith(
        "failed: OSError: [Errno 27]"
    )
    several = "import time\nfor n in range(40): open(str(n), 'wb').write(bytes(1 << 20))\ntime.sleep(9)"
    assert run(several).reason == "killed: disk"


def test_many_files_end_it() -> None:
    assert run("import time\nfor n in range(500): open(str(n), 'w').close()\ntime.sleep(9)").reason == "killed: disk"
    assert run("x = [open('x', 'w') for _ in range(100)]").reason.startswith("failed: OSError: [Errno 24]")


def test_huge_output_ends_it() -> None:
    outcome = run("while True: print('x' * 1000)")
    assert outcome.reason == "killed: output" and len(outcome.output) == sandbox.TAIL
    assert run("import os\nfor fd in range(3, 64):\n    try:\n        while True: os.write(fd, b'x' * 1000)\n"
               "    except OSError: pass").reason == "killed: output"  # fmt: skip


def test_a_little_output_is_kept_and_does_no_harm() -> None:
    outcome = run("import os\nprint('x' * 100_000)\nos.write(2, b'\\xff')\nprint('end')")
    assert outcome.passed and outcome.output.endswith("x\ufffd\nend\n") and len(outcome.output) == sandbox.TAIL


# Other processes. Nothing here would do much harm if the sandbox were broken.


@pytest.mark.parametrize(
    "statements",
    [
        "os.fork()",
        "for _ in range(5): os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', ''], start_new_session=True)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "import multiprocessing; multiprocessing.get_context('spawn').Process(target=print).start()",
        "import multiprocessing; multiprocessing.get_context('forkserver').Process(target=print).start()",
        "os.setsid()",
        "os.kill(os.getppid(), 0)",
        "import signal; os.kill(os.getppid(), signal.SIGURG)",
        "import signal; os.killpg(0, signal.SIGURG)",
        "import signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "os.setpriority(os.PRIO_PROCESS, 0, 19)",
        "os.sched_setaffinity(0, {0})",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))",
        "os.setuid(12345)",
        "os.setgid(12345)",
    ],
)
def test_no_other_process(statements: str) -> None:
    assert refused(statements, errno.ENOSYS).reason == "passed"


NUMBERS = {  # x86_64, aarch64
    "clone, as fork does": (56, 220, "17"),
    "clone, a thread in a new network": (56, 220, "0x3D0F00 | 0x40000000"),
    "vfork": (58, None, ""),
    "clone3": (435, 435, "bytes(88), 88"),
    "ptrace": (101, 117, "0"),
    "process_vm_readv": (310, 270, "os.getppid()"),
    "pidfd_getfd": (438, 438, "0, 0"),
    "tgkill": (234, 131, "os.getppid(), os.getppid(), 0"),
    "rt_sigqueueinfo": (129, 138, "os.getppid(), 0, bytes(128)"),
    "mount": (165, 40, ""),
    "unshare": (272, 97, "0x10000000"),
    "io_uring_setup": (425, 425, "8, bytes(120)"),
    "keyctl": (250, 219, "0, -3, 0"),
    "bpf": (321, 280, ""),
    "perf_event_open": (298, 241, ""),
    "userfaultfd": (323, 282, "0"),
    "memfd_create": (319, 279, "b'x', 0"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "prctl": (157, 167, "1, 0"),
    "capset": (126, 91, ""),
    "open_by_handle_at": (304, 265, ""),
    "seccomp": (317, 277, "0"),
    "getpid of the x32 kind": (39 | 1 << 30, None, ""),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_no_such_system_call(name: str) -> None:
    *numbers, arguments = NUMBERS[name]
    number = numbers[["x86_64", "aarch64"].index(platform.machine())]
    if number is None:
        pytest.skip("not on this machine")
    call = f"libc.syscall({number}{', ' if arguments else ''}{arguments})"
    outcome = run(
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"assert ({call}, ctypes.get_errno()) == (-1, {errno.ENOSYS})"
    )
    assert outcome.reason == "passed"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code for x86_64")
def test_calls_of_another_architecture_end_it() -> None:
    program = """
import ctypes, mmap
place = mmap.mmap(-1, 4096, prot=7)
place.write(b"\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3")  # mov eax, 20; int 0x80; ret: getpid, were this 32 bits
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(place)))()
"""
    assert run(program).reason in {"killed: SIGSYS", "killed: SIGSEGV"}  # the latter in kernels without 32 bits


def test_it_dies_with_its_parent() -> None:
    command = "from mars.evaluation.sandbox import run; run('while True: pass')"
    parent = subprocess.Popen([sys.executable, "-c", command], env=os.environ | {"TMPDIR": "/tmp"})
    deadline = time.monotonic() + 20
    while not (children := psutil.Process(parent.pid).children()) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    folder = Path(children[0].cwd())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    folder.rmdir()  # the one thing that a killed parent leaves


# Files outside


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("secret")
    return file


READING = [
    "open('{0}').read()",
    "open('{0}', 'rb', buffering=0).read()",
    "os.open('{0}', os.O_RDONLY)",
    "os.listdir(os.path.dirname('{0}'))",
    "os.chdir(os.path.dirname('{0}')); open('secret').read()",
    "os.link('{0}', 'here')",
    "os.symlink('{0}', 'here')",
    "import ctypes; ctypes.CDLL('{0}')",
]
WRITING = [
    "open('{0}', 'w').write('x')",
    "open('{0}', 'a').write('x')",
    "open('{0}', 'r+').write('x')",
    "open('{0}2', 'w')",
    "os.open('{0}', os.O_RDONLY | os.O_TRUNC)",
    "os.truncate('{0}', 0)",
    "os.unlink('{0}')",
    "os.rename('{0}', 'here')",
    "os.rename('{0}', '{0}2')",
    "open('here', 'w').close(); os.rename('here', '{0}')",
    "os.mkdir('{0}2')",
    "os.mkfifo('{0}2')",
    "os.rmdir(os.getcwd())",
    "os.chmod('{0}', 0)",
    "os.chown('{0}', 1, 1)",
    "os.utime('{0}', (0, 0))",
    "os.setxattr('{0}', 'user.x', b'x')",
]


@pytest.mark.parametrize("abi", [None, 1, 3])
@pytest.mark.parametrize("statements", READING + WRITING)
def test_no_file_outside(statements: str, abi: int | None, outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if abi is not None:  # an older kernel's
        newest = sandbox._landlock_abi()
        monkeypatch.setattr(sandbox, "_landlock_abi", lambda: min(abi, newest))
    before = outside.stat()
    assert refused(statements.format(outside)).reason == "passed"
    assert outside.read_text() == "secret" and outside.stat().st_mode == before.st_mode
    assert outside.stat().st_mtime == before.st_mtime and not outside.with_name("secret2").exists()


@pytest.mark.parametrize(
    "place",
    [
        *("/etc/passwd", "/etc/hostname", "/proc/self/environ", "/proc/self/mem", "/proc/self/maps", "/proc/1/environ"),
        *("/sys/kernel/notes", "/dev/tty", "/dev/zero", "/proc/{parent}/environ", __file__, sandbox.__file__),
    ],
)
def test_no_file_of_the_system_or_ours(place: str) -> None:
    place = place.format(parent=os.getpid())
    assert refused(f"open({place!r}, 'rb').read(1)").reason == "passed"


def test_no_folder_of_ours() -> None:
    for place in (Path.home(), Path.cwd(), Path(tempfile.gettempdir()), Path("/"), Path("/etc"), Path("/proc")):
        assert refused(f"os.listdir({str(place)!r})").reason == "passed"


def test_truncating_while_reading_is_refused_by_the_filter_too() -> None:
    """Landlock did not know of it at first; where Landlock allows it, only the filter is left."""
    program = "open('x', 'w').write('x')\nos.open('x', os.O_RDONLY | os.O_TRUNC)"
    assert refused(program).reason == "passed"


def test_root_has_no_more_rights_than_others() -> None:
    assert refused("os.umask(0o777); open('x', 'w').close(); open('x').read()", errno.EACCES).reason == "passed"


def test_two_programs_do_not_see_each_other(tmp_path: Path) -> None:
    look = "import os, time\nopen('mine', 'w').close()\ntime.sleep(0.3)\nassert os.listdir() == ['mine']\n"
    other = "try: os.listdir('..')\nexcept OSError: pass\nelse: raise AssertionError"
    assert [each.reason for each in run_all([look + other] * 2, workers=2)] == ["passed"] * 2


# Network, environment, input


@pytest.mark.parametrize(
    "statements",
    [
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import socket; socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
        "import socket; socket.socket(socket.AF_UNIX)",
        "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "import socket; socket.socketpair()",
        "import socket; socket.create_connection(('127.0.0.1', 80), 1)",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
    ],
)
def test_no_network(statements: str) -> None:
    assert refused(statements, errno.ENOSYS).reason == "passed"


def test_no_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "helper.py"))
    outcome = run("import os, sys\nprint(dict(os.environ), sys.path, sys.argv, sys.orig_argv)")
    assert outcome.passed and "hf_secret" not in outcome.output and str(tmp_path / "helper") not in outcome.output
    assert run("import helper").reason == "failed: ModuleNotFoundError: No module named 'helper'"
    assert run("import mars").reason == "failed: ModuleNotFoundError: No module named 'mars'"


def test_no_descriptor_of_ours(outside: Path) -> None:
    with outside.open() as file:
        os.set_inheritable(file.fileno(), True)
        program = (
            f"import os\nfor fd in range(3, 64):\n    try: print(os.fstat(fd).st_ino == {outside.stat().st_ino})\n"
        )
        assert "True" not in run(program + "    except OSError: pass").output


def test_there_is_nothing_to_read() -> None:
    assert run("import os, sys\nassert sys.stdin.read() == '' and os.read(0, 10) == b''").reason == "passed"


# Many at once


def test_many_come_back_in_order() -> None:
    seen: dict[int, Outcome] = {}
    programs = [f"import time; time.sleep({0.3 - n / 10}); print({n}); assert {n} != 2" for n in range(4)]
    outcomes = run_all(programs, workers=4, on_done=seen.__setitem__)
    assert [each.output.split("\n")[0] for each in outcomes] == ["0", "1", "2", "3"]
    assert [each.passed for each in outcomes] == [True, True, False, True]
    assert [seen[n] for n in range(4)] == outcomes and list(seen) != [0, 1, 2, 3]
    assert run_all([]) == []


def test_an_interruption_stops_the_rest() -> None:
    def interrupt(number: int, outcome: Outcome) -> None:
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_all(["import time; time.sleep(0.2)"] * 100, workers=2, on_done=interrupt)
    assert time.monotonic() - start < 5


# Where it cannot be done


def test_other_systems_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._landlock_abi.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "riscv64")
        for refuse in (sandbox.check, lambda: run(""), lambda: run_all([""])):
            with pytest.raises(MarsError, match=r"Linux only.*not on Linux riscv64"):
                refuse()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(MarsError, match="Linux only"):
            sandbox.check()


@pytest.mark.parametrize(("code", "advice"), [(errno.ENOSYS, "5.13 or newer"), (errno.EOPNOTSUPP, "lsm= option")])
def test_a_kernel_without_landlock_is_refused(code: int, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox._landlock_abi.cache_clear()
    kernel = SimpleNamespace(syscall=lambda *_: -1)
    fake = SimpleNamespace(CDLL=lambda *_, **__: kernel, c_ulong=ctypes.c_ulong, get_errno=lambda: code)
    monkeypatch.setattr(sandbox, "ctypes", fake)
    with pytest.raises(MarsError, match=f"no Landlock.*{advice}"):
        sandbox.check()


@pytest.mark.parametrize(
    ("part", "broken", "named"),
    [
        ("_filter", lambda: b"", "seccomp"),
        ("_rights", lambda abi: (b"\xff" * 24, 0), "Landlock"),
        ("_source", lambda: "raise SystemExit('out of order')", "out of order"),
        ("_source", lambda: "", "exit code 0"),
    ],
)
def test_nothing_runs_unlocked(part: str, broken, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, part, broken)
    with pytest.raises(MarsError, match=f"does not start.*{named}"):
        run("")


def test_a_process_that_does_not_get_ready_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "_source", lambda: "import time; time.sleep(60)")
    with pytest.raises(MarsError, match=r"does not start \(timed out\)"):
        run("")
