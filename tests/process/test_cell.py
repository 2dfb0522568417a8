"""The cell: what a confined child can reach, at each level that this machine has. Every probe is a real child."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kbsub.eval.process import cell as cells
from kbsub.eval.process.cell import Cell, candidate_folder, probe
from kbsub.eval.process.isolated import Status, run_isolated
from support.paths import child_path

HERE = Path(__file__).resolve().parent  # a folder outside the cell that nothing may write
LIMIT_S = 60


def needs(level: str) -> str:
    """Skip where this machine cannot enter `level`; else the level."""
    found = probe(level)
    if found.level != level:
        pytest.skip(f"cell: this machine has no {level} ({found.why.get(level)})")
    return level


@pytest.fixture(params=["namespaces", "landlock"])
def confined(request, tmp_path):
    """A cell of each level that confines, in a folder of its own."""
    return Cell(tmp_path / "cell", level=needs(request.param))


def in_cell(cell: Cell, code: str, **options) -> str:
    """What a python child printed inside; the test fails when it did not end by itself with 0."""
    child = start(cell, code, **options)
    try:
        text = child.communicate(timeout=LIMIT_S)[0].decode()
    finally:
        cell.end(child)
    assert child.returncode == 0, text
    return text.strip()


def start(cell: Cell, code: str, **options) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)]
    return cell.popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def attempt(path: object) -> str:
    """Code that prints "written" or "refused" for appending to a file."""
    return f"""
try:
    with open({str(path)!r}, "a") as file: file.write("x")
    print("written")
except OSError: print("refused")
"""


# ---- files ----


def test_neither_repository_nor_result_nor_neighbours_cache_can_be_written(confined, tmp_path):
    result, neighbour = tmp_path / "result.json", tmp_path / "neighbour" / "cache" / "x"
    neighbour.parent.mkdir(parents=True)
    for file in (result, neighbour):
        file.write_text("honest")
    mine = HERE / "test_cell.py"
    before = mine.read_bytes()
    places = [result, neighbour, mine, "/etc/kbsub-probe", "/var/tmp/kbsub-probe"]
    cell = Cell(confined.folder, level=confined.level, readable=(tmp_path,))
    assert in_cell(cell, "".join(map(attempt, places))).split() == ["refused"] * len(places)
    assert (result.read_text(), neighbour.read_text(), mine.read_bytes()) == ("honest", "honest", before)


def test_its_own_cache_is_kept_and_temporary_files_are_not(confined):
    code = """
    import os, tempfile
    for name in ("HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"):
        open(os.environ[name] + "/kept", "w").close()
    with tempfile.NamedTemporaryFile(delete=False) as file: print(file.name)
    """
    temporary = in_cell(confined, code)
    assert (confined.cache / "triton" / "kept").exists()
    assert not Path(temporary).exists()


def test_what_it_reads_is_seen_inside(confined, tmp_path):
    task = tmp_path / "task.py"
    task.write_text("the task")
    cell = Cell(confined.folder, level=confined.level, readable=(task,))
    assert in_cell(
        cell, f"print(open({str(task)!r}).read(), len(open({str(HERE / 'test_cell.py')!r}).read()) > 0)"
    ) == ("the task True")


def test_writing_to_shared_memory_is_not_seen_outside(confined):
    name = Path(f"/dev/shm/kbsub-test-{os.getpid()}")
    in_cell(confined, attempt(name))
    assert not name.exists()


def test_a_mount_cannot_be_made_writable_again(tmp_path):
    cell = Cell(tmp_path / "cell", level=needs("namespaces"))
    code = f"""
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    for target in (b"/", b"/etc", {str(HERE).encode()!r}, b"/proc", b"/dev"):
        for flag in (32, 32 | 4096):
            print(libc.mount(None, target, None, flag, None))
        print(libc.umount2(target, 2), libc.syscall(442, -100, target, 0, bytes([0] * 8 + [1] + [0] * 23), 32))
    print(libc.mount(b"x", b"/tmp", b"tmpfs", 0, None), libc.unshare(0x10000000), libc.unshare(0x00020000))
    """
    assert set(in_cell(cell, code).split()) == {"-1"}


def test_no_capability_is_left_or_to_be_gained(confined):
    status = in_cell(confined, "print(open('/proc/self/status').read())")
    found = dict(line.split(":\t") for line in status.splitlines() if line.startswith(("Cap", "NoNewPrivs")))
    assert found.pop("NoNewPrivs") == "1"
    if confined.level == "namespaces" or os.geteuid() == 0:
        assert {key: int(value, 16) for key, value in found.items()} == dict.fromkeys(found, 0)


def test_disks_and_other_devices_cannot_be_written(confined):
    code = """
    import os, stat
    for folder, _, names in os.walk("/dev"):
        for name in names:
            try: mode = os.stat(os.path.join(folder, name)).st_mode
            except OSError: continue
            if stat.S_ISBLK(mode):
                try: os.close(os.open(os.path.join(folder, name), os.O_WRONLY)); print("opened", name)
                except OSError: pass
    open("/dev/null", "w").write("x"); print(len(os.urandom(3)), len(open("/dev/urandom", "rb").read(4)))
    try: open("/dev/new", "w"); print("made")
    except OSError: pass
    """
    assert in_cell(confined, code) == "3 4"


@pytest.mark.skipif(not os.access("/proc/sys/kernel/core_pattern", os.W_OK), reason="needs a user who could")
def test_settings_of_the_kernel_cannot_be_written(confined):
    before = Path("/proc/sys/kernel/core_pattern").read_text()
    assert in_cell(confined, attempt("/proc/sys/kernel/core_pattern")) == "refused"
    assert Path("/proc/sys/kernel/core_pattern").read_text() == before


# ---- processes ----


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_signal_to_the_parent_is_refused(confined, number):
    if confined.level == "landlock" and any("signals" in each for each in confined.confinement().lacks):
        pytest.skip(f"cell: {confined.confinement().lacks}")
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        code = f"""
        import os
        for pid in ({os.getpid()}, {bystander.pid}, os.getppid()):
            try:
                # pid 1 of the namespace ignores it; under Landlock the launcher is another's
                if pid > 1: os.kill(pid, {int(number)}); print("sent to", pid)
            except OSError: pass
        """
        assert in_cell(confined, code) == ""
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_its_own_group_does_not_reach_the_launcher(confined):
    child = start(confined, "import os; os.kill(0, 9)")
    child.communicate(timeout=LIMIT_S)
    assert child.returncode == -signal.SIGKILL  # the child's own end, not a hang and not the launcher's exit code


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(%d) # %s"], {})
    os._exit(0)
os.wait(); time.sleep(0.3); print("left")
"""


def running(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "cmdline").read_text():
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("level", cells.LEVELS)
def test_a_daemon_ends_with_its_cell(tmp_path, level):
    mark = f"kbsub-daemon-{os.getpid()}-{level}"
    cell = Cell(tmp_path / "cell", level=needs(level))
    assert in_cell(cell, DAEMON % (60, mark)) == "left"
    assert running(mark) == []


@pytest.mark.parametrize("level", cells.LEVELS)
def test_a_cell_that_is_ended_leaves_nobody(tmp_path, level):
    mark = f"kbsub-ended-{os.getpid()}-{level}"
    cell = Cell(tmp_path / "cell", level=needs(level))
    child = start(cell, DAEMON % (60, mark) + "\nsys.stdout.flush(); time.sleep(60)")
    assert child.stdout is not None and child.stdout.readline() == b"left\n"
    assert len(running(f"-c\0import time; time.sleep(60) # {mark}")) == 1
    cell.end(child)
    child.stdout.close()
    assert running(mark) == []


ENDS = {
    "import sys; sys.exit(5)": 5,
    "import os; os.abort()": -signal.SIGABRT,
    "import os; os.kill(os.getpid(), 9)": -signal.SIGKILL,
    "import ctypes; ctypes.string_at(0)": -signal.SIGSEGV,
}


@pytest.mark.parametrize("level", cells.LEVELS)
@pytest.mark.parametrize("code", ENDS)
def test_the_end_of_the_command_is_what_the_parent_sees(tmp_path, code, level):
    child = start(Cell(tmp_path / "cell", level=needs(level)), code)
    child.communicate(timeout=LIMIT_S)
    assert child.returncode == ENDS[code]


def test_the_cell_dies_with_the_process_that_made_it(tmp_path):
    mark = f"kbsub-orphan-{os.getpid()}"
    level = needs("namespaces")
    judge = f"""
import os, pathlib, signal, sys, time
from kbsub.eval.process.cell import Cell
cell = Cell(pathlib.Path({str(tmp_path / "cell")!r}), level={level!r})
child = cell.popen([sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(60) # {mark}"])
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", judge], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.kill()
    deadline = time.monotonic() + 10
    while running(f"sleep(60) # {mark}"):
        assert time.monotonic() < deadline, "the cell outlived its judge"
        time.sleep(0.05)


# ---- what comes in ----


def test_nothing_of_the_parents_environment_comes_in_but_what_compilers_need(confined, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hush")
    monkeypatch.setenv("KBSUB_RUN", "hush")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    found = json.loads(in_cell(confined, "import json, os; print(json.dumps(dict(os.environ)))"))
    allowed = cells.KEPT_VARIABLES | set(cells.CACHE_VARIABLES)
    allowed |= {"TMPDIR", "USER", "LOGNAME", "PYTHONUSERBASE", "LC_CTYPE"}  # the last is set by Python itself
    assert set(found) <= allowed and found["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert "hush" not in found.values()
    assert found["HOME"] != os.environ.get("HOME")


def test_no_other_process_can_be_looked_into(confined):
    code = f"""
    for name in ("environ", "mem", "maps"):
        try: open("/proc/{os.getpid()}/" + name, "rb").read(1); print("read", name)
        except OSError: pass
    """
    assert in_cell(confined, code) == ""


def test_no_descriptor_is_inherited_but_the_ones_passed(confined, tmp_path):
    with open(tmp_path / "open.txt", "w") as file:
        os.set_inheritable(file.fileno(), True)
        read, write = os.pipe()
        code = f"""
        import os
        print([fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{{fd}}")], os.write({write}, b"yes"))
        """
        text = in_cell(confined, code, pass_fds=(write,))
        os.close(write)
        assert text == f"[{write}] 3"
        assert os.read(read, 9) == b"yes"
        os.close(read)


def test_there_is_no_network(confined):
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"""
        import socket
        try: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), 2); print("connected")
        except OSError: print("refused")
        """
        if any("TCP" in each for each in confined.confinement().lacks):
            pytest.skip(f"cell: {confined.confinement().lacks}")
        assert in_cell(confined, code) == "refused"


# ---- the caller is not misled ----


def test_a_link_left_in_the_cache_leads_nobody_outside(confined, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    os.utime(precious / "file", (1, 1))
    code = f"""
    import os, shutil
    cache = os.environ["HOME"].rpartition("/")[0]
    for name in os.listdir(cache):
        shutil.rmtree(os.path.join(cache, name)); os.symlink({str(precious)!r}, os.path.join(cache, name))
    """
    in_cell(confined, code)
    in_cell(confined, "print()")
    assert [path.name for path in precious.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["../../etc", "", "A" * 64, "a" * 63])
def test_a_candidates_folder_is_named_by_a_sha256_only(name):
    with pytest.raises(ValueError, match="no sha256"):
        candidate_folder(name)


# ---- what the machine can do ----


def test_where_unshare_is_refused_landlock_is_taken_and_the_record_says_why(tmp_path):
    """Within a cell no namespace can be made: so it looks on a machine that refuses them."""
    needs("namespaces")
    needs("landlock")
    code = "import json; from kbsub.eval.process import cell; f = cell.probe(); print(json.dumps([f.record(), f.why]))"
    child = Cell(tmp_path / "cell").popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    record, why = json.loads(child.communicate(timeout=LIMIT_S)[0])
    assert record["level"] == "landlock" and "unshare" in why["namespaces"]
    assert record["lacks"], "Landlock never gives everything"


@pytest.mark.parametrize("refused", [("mount_setattr",), ("proc",), ("mount_setattr", "proc")])
def test_an_older_kernel_or_a_masked_proc_still_confines(tmp_path, refused):
    cell = Cell(tmp_path / "cell", level=needs("namespaces"), refuse=refused)
    places = [HERE / "test_cell.py", "/etc/kbsub-probe", "/dev/kbsub-probe", "/proc/sys/kernel/core_pattern"]
    code = "".join(map(attempt, places)) + attempt(cell.cache / "x") + attempt(Path("/tmp") / "x")
    assert in_cell(cell, code).split() == ["refused"] * len(places) + ["written"] * 2


def test_a_cell_that_cannot_be_entered_runs_nothing(tmp_path):
    """Never in a weaker one instead."""
    for level, refused in (("namespaces", "unshare"), ("landlock", "landlock")):
        cell = Cell(tmp_path / "cell", level=needs(level), refuse=(refused,))
        child = start(cell, "print('it ran')")
        assert b"it ran" not in child.communicate(timeout=LIMIT_S)[0]
        assert child.returncode == 98


def test_what_is_recorded_is_what_this_child_entered_and_no_probe(tmp_path):
    """A machine may refuse to one child what it gave to another: the launcher of this one says what it has."""
    cell = Cell(tmp_path / "cell", level=needs("namespaces"), refuse=("proc",))
    assert cell.confinement().lacks == (), "this machine lacks something anyway: the test proves nothing"
    child = start(cell, "print('ran')")
    entered = child.entered()
    child.communicate(timeout=LIMIT_S)
    assert entered is not None and entered.level == "namespaces" and "a /proc of its own" in entered.lacks[0]
    outcome = stage("answer", cell)
    assert outcome.confined == {"level": "namespaces", "lacks": list(entered.lacks)}


def test_a_stage_whose_cell_is_refused_is_not_run_and_has_no_confinement(tmp_path):
    outcome = stage("answer", Cell(tmp_path / "cell", level=needs("namespaces"), refuse=("unshare",)))
    assert (outcome.status, outcome.value, outcome.confined) == (Status.NOT_RUN, None, None)
    assert "the cell cannot be entered" in outcome.message and "unshare" in outcome.message


def test_a_level_that_is_named_is_entered_or_nothing_is_run(tmp_path, monkeypatch):
    """Where nobody names one, the next best is: the record says which, and why."""
    needs("landlock")
    monkeypatch.setenv(cells.REFUSE_VARIABLE, "unshare")
    named = stage("answer", Cell(tmp_path / "cell", level="namespaces"))
    assert named.status is Status.NOT_RUN, named
    free = stage("answer", Cell(tmp_path / "cell"))
    assert free.status is Status.OK and free.confined["level"] == "landlock"
    assert "namespaces: " in free.confined["why"] and "unshare" in free.confined["why"]
    assert cells.in_words(free.confined).startswith("landlock: namespaces: ")


@pytest.mark.parametrize("level", ["landlock", "unconfined"])
def test_a_weaker_level_that_was_asked_for_stands_in_the_record(monkeypatch, level):
    monkeypatch.setenv(cells.LEVEL_VARIABLE, level)
    record = probe().record()
    assert record["level"] in (level, "unconfined")
    assert "namespaces: a weaker level was asked for" in record["why"]


def test_an_unknown_level_is_said(monkeypatch):
    monkeypatch.setenv(cells.LEVEL_VARIABLE, "bubble")
    with pytest.raises(ValueError, match="no cell called 'bubble'"):
        probe()


def test_the_best_level_of_this_kernel_is_found():
    """A probe that always said "unconfined" would pass everything above by skipping."""
    works = subprocess.run(["unshare", "-Urmpf", "true"], capture_output=True, check=False).returncode == 0
    assert (probe().level == "namespaces") == works or os.environ.get(cells.LEVEL_VARIABLE), probe()


# ---- stages ----


def stage(name: str, cell: Cell, timeout_s: float = LIMIT_S, **options):
    target = f"support.isolation_targets:{name}"
    return run_isolated(target, {"number": 7}, timeout_s=timeout_s, env=child_path(), cell=cell, **options)


@pytest.mark.parametrize("level", cells.LEVELS)
def test_a_stage_answers_in_a_cell_as_it_does_without(tmp_path, level):
    events: list[dict] = []
    outcome = stage("answer", Cell(tmp_path / "cell", level=needs(level)), on_progress=events.append)
    assert outcome.status is Status.OK, outcome
    assert outcome.value == {"echo": {"number": 7}, "stdin": "", "cwd_on_path": False}
    assert events == [{"stage": "trial", "index": 0, "seed": 42}]


# The function of isolation_targets, what it comes to, and a word of the message or of the log.
STAGE_ENDS = {
    "segfault": (Status.CRASHED, "SIGSEGV"),
    "killed": (Status.OUT_OF_MEMORY, "SIGKILL"),
    "abort_bad_alloc": (Status.OUT_OF_MEMORY, "bad_alloc"),
    "leave_quietly": (Status.CRASHED, "exit code 0"),
}


@pytest.mark.parametrize("level", cells.LEVELS)
@pytest.mark.parametrize("name", STAGE_ENDS)
def test_a_stage_that_dies_in_a_cell_has_the_status_it_has_without(tmp_path, name, level):
    outcome = stage(name, Cell(tmp_path / "cell", level=needs(level)))
    assert (outcome.status, STAGE_ENDS[name][1] in outcome.message) == (STAGE_ENDS[name][0], True), outcome


@pytest.mark.slow
@pytest.mark.parametrize("level", cells.LEVELS)
def test_a_stage_that_hangs_in_a_cell_is_ended_and_its_log_says_where(tmp_path, level):
    outcome = stage("hang_deaf", Cell(tmp_path / "cell", level=needs(level)), timeout_s=8)
    assert outcome.status is Status.TIMEOUT
    assert "trial 2 (seed 2746317213)" in outcome.message
    assert "isolation_targets.py" in outcome.log, "faulthandler's dump did not come through the launcher"
    assert outcome.seconds < 25
