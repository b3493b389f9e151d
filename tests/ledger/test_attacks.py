"""What disks, other processes, clocks and people do to a ledger: it stays sound, or the error says what happened."""

import os
import signal
import subprocess
import sys
import time

import pytest

from det_lightning.errors import LedgerError
from det_lightning.ledger.chain import verify_chain
from det_lightning.ledger.lines import FIRST_CHAIN
from det_lightning.ledger.retention import Retention
from det_lightning.ledger.store import LedgerReader, LedgerWriter
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import append_steps, trace_at, write_run
from tests.ledger.test_hostile_ledgers import HEADER, encode_line, ledger, read_everything, refused, with_lines

HUGE = 10 * 2**30
SOUND = encode_line("header", HEADER, FIRST_CHAIN)


def test_a_sparse_file_of_ten_gigabytes_is_refused_after_a_small_part_of_it(tmp_path, monkeypatch):
    path = write_run(tmp_path / "run", 5)
    os.truncate(path / "ledger.jsonl", HUGE)
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: read.append(size) or pread(file, size, offset))
    assert "it is not a ledger" in refused(path)
    with open(path / "ledger.jsonl", "r+b") as file:
        file.seek(HUGE)
        file.write(b"\n")
    assert "no line end in" in refused(path)
    assert "does not end within" in verify_chain(path).damage.what
    assert 0 < sum(read) < HUGE / 8


def test_leaves_with_ten_gigabytes_behind_them_are_counted_and_not_read(tmp_path):
    path = write_run(tmp_path / "run", 5, close=False)
    size = (path / "leaves-weights.bin").stat().st_size
    os.truncate(path / "leaves-weights.bin", HUGE)
    read_everything(path)
    assert verify_chain(path).torn_leaf_bytes == {"weights": HUGE - size}
    LedgerWriter.reopen(path, step=5, trace=trace_at(path, 5), environment={}).close()
    assert (path / "leaves-weights.bin").stat().st_size == size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"kind":' + b"9" * 10**6 + b"}\n", "it is not JSON as a ledger writes it"),
        (b'{"kind":-' + b"9" * 10**6 + b"}\n", "it is not JSON as a ledger writes it"),
        (b'{"kind":Infinity}\n', "is not an integer"),
        (b'{"kind":1e400}\n', "is not an integer"),
        (b'{"a":' * 10**6 + b"}" * 10**6 + b"\n", "nested too deeply"),
        (encode_line("header", HEADER, FIRST_CHAIN).replace(b'"recipe":{}', b'"recipe":{},"recipe":{}'), "canonical"),
        (
            encode_line("header", HEADER, FIRST_CHAIN).replace(b'"kind":"header"', b'"kind":"seam","kind":"header"'),
            "canonical",
        ),
    ],
)
def test_numbers_without_end_and_keys_that_come_twice_are_refused(tmp_path, content, message):
    assert message in refused(ledger(tmp_path / "run", content))


def test_leaves_of_another_run_do_not_pass_for_its_own(tmp_path):
    path, other = write_run(tmp_path / "a", 5), write_run(tmp_path / "b", 5, changes=[(0, "weights", "layer.0.bias")])
    (path / "leaves-weights.bin").write_bytes((other / "leaves-weights.bin").read_bytes())
    assert "do not have the root" in verify_chain(path).damage.what
    third = write_run(tmp_path / "c", 5, changes=[(2, "weights", "layer.2.bias")])
    code, out, err = answer(["bisect", str(path), str(third)])
    assert code == 125 and "is damaged" in out + err


NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "a\x00b",
    "a\nb",
    "\x1b[2J",
    "<script>alert(1)</script>",
    "x" * 70_000,
    "",
)


def test_tensor_names_lead_nowhere_and_move_no_cursor(tmp_path):
    path = write_run(tmp_path / "a", 3, names=NAMES)
    other = write_run(tmp_path / "b", 3, names=NAMES, changes=[(2, "weights", name) for name in NAMES])
    read_everything(path)
    before = sorted(each.name for each in tmp_path.rglob("*"))
    for command in (
        ["show", str(path), "--tensors"],
        ["bisect", str(path), str(other)],
        ["diff", str(path), str(other)],
    ):
        code, out, _ = answer(command)
        assert code in (0, 1) and "\x1b" not in out and "\x00" not in out
    assert answer(["bisect", str(path), str(other), "--html", str(tmp_path / "report.html")])[0] == 1
    assert "<script>alert" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(each.name for each in tmp_path.rglob("*")) == sorted([*before, "report.html"])


def test_a_part_that_leads_elsewhere_is_no_part(tmp_path):
    layout = ("layout", {"of": "weights", "id": 0, "names": []})
    for part in ("../x", -1, 2**63, True):
        fields = {"step": 0, "agree": {"step": 0, "roots": {}}, "facts": {}, "trace": "11" * 32, "segment": 0}
        path = with_lines(tmp_path, layout, ("record", {**fields, "leaves": {"weights": [0, 0, part]}}))
        assert "not [layout id, byte offset]" in refused(path)


@pytest.mark.parametrize("name", ["ledger.jsonl", "leaves-weights.bin"])
def test_a_link_to_another_file_is_not_written_through(tmp_path, name):
    path = write_run(tmp_path / "run", 5, close=False)
    trace, victim = trace_at(path, 5), tmp_path / "victim"
    (path / name).rename(victim)
    (path / name).symlink_to(victim)
    before = victim.read_bytes()
    with pytest.raises(LedgerError, match="symbolic link, which is not followed"):
        LedgerWriter.reopen(path, step=5, trace=trace, environment={})
    assert victim.read_bytes() == before


def test_a_link_in_the_place_of_a_new_ledger_is_not_written_through(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "run/ledger.jsonl.new").symlink_to(tmp_path / "victim")
    with pytest.raises(LedgerError, match="symbolic link"):
        write_run(tmp_path / "run", 1)
    assert (tmp_path / "victim").read_text() == "precious"


LIMITED = """
import resource, sys
from det_lightning.errors import LedgerError
from det_lightning.ledger.retention import Retention
from det_lightning.ledger.store import LedgerWriter
from tests.ledger.example_runs import append_steps
path, limit = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    writer = LedgerWriter.create(path, recipe={}, environment={}, entry={}, retention=Retention(6, 50))
    for step in range(10_000):
        append_steps(writer, [step])
except LedgerError as error:
    print(error)
"""


@pytest.mark.parametrize("limit", [0, 100, 4096, 10_000, 40_000])
def test_a_disk_that_is_full_ends_the_run_with_a_reason_and_a_sound_ledger(tmp_path, limit):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "run"), str(limit)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stdout
    if limit <= 100:
        assert not (tmp_path / "run/ledger.jsonl").exists()
        write_run(tmp_path / "run", 3)  # with room again
        return
    report = verify_chain(tmp_path / "run")
    assert report.sound and report.last_step > 2 and report.torn_bytes == 0
    trace = trace_at(tmp_path / "run", report.last_step)
    writer = LedgerWriter.reopen(
        tmp_path / "run", step=report.last_step, trace=trace, environment={}, retention=Retention(6, 50)
    )
    append_steps(writer, range(report.last_step + 1, report.last_step + 30))
    writer.close()
    assert verify_chain(tmp_path / "run").sound


@pytest.mark.parametrize("folder", ["/proc/ledger", "/sys/kernel/ledger", "/dev/null/ledger"])
def test_a_directory_that_cannot_be_written_is_an_error_with_its_path(folder):
    with pytest.raises(LedgerError, match=folder):
        LedgerWriter.create(folder, recipe={}, environment={}, entry={})


STARTED = """
import sys, time
from det_lightning.errors import LedgerError
from det_lightning.ledger.store import LedgerWriter
from tests.ledger.example_runs import append_steps
print("ready", flush=True)
begin = float(sys.stdin.readline())
while time.time() < begin:
    pass
try:
    writer = LedgerWriter.create(sys.argv[1], recipe={"who": sys.argv[2]}, environment={}, entry={})
    append_steps(writer, range(20))
    writer.close()
    print("wrote", sys.argv[2])
except LedgerError as error:
    print("refused", error)
"""


def test_of_several_runs_that_start_in_one_directory_at_once_one_writes_and_the_others_are_refused(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for attempt in range(3):
        path = tmp_path / str(attempt)
        running = [
            subprocess.Popen(
                [sys.executable, "-c", STARTED, str(path), str(who)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for who in range(3)
        ]
        assert [each.stdout.readline() for each in running] == ["ready\n"] * 3
        begin = time.time() + 0.2
        for each in running:
            print(begin, file=each.stdin, flush=True)
        told = [each.communicate(timeout=600)[0].split() for each in running]
        wrote = [words[1] for words in told if words[0] == "wrote"]
        assert len(wrote) == 1 and len(told) == 3
        report = verify_chain(path)
        assert (report.sound, report.records, report.closed) == (True, 20, True)
        with LedgerReader(path) as reader:
            assert reader.recipe == {"who": wrote[0]}


def test_a_clock_that_goes_backwards_changes_nothing(tmp_path):
    writers = [LedgerWriter.create(tmp_path / name, recipe={}, environment={}, entry={}) for name in "ab"]
    for step in range(6):
        for writer, clock in zip(writers, (step, 10**18 - step), strict=True):
            writer.append({"step": step, "roots": {}}, {}, {"time_ns": clock})
    assert writers[0].trace == writers[1].trace
    for writer in writers:
        writer.close()
    assert answer(["bisect", str(tmp_path / "a"), str(tmp_path / "b")])[0] == 0


def test_a_forked_child_does_not_end_its_parents_ledger(tmp_path):
    writer = LedgerWriter.create(tmp_path / "run", recipe={}, environment={}, entry={}, retention=Retention(2))
    append_steps(writer, range(4))
    child = os.fork()
    if child == 0:
        writer.abandon()
        os._exit(0)
    os.waitpid(child, 0)
    append_steps(writer, range(4, 9))
    writer.close()
    report = verify_chain(tmp_path / "run")
    assert (report.sound, report.records, report.closed) == (True, 9, True)


ORPHAN = """
import os, signal, sys, time
from det_lightning.ledger.store import LedgerWriter
from tests.ledger.example_runs import append_steps
writer = LedgerWriter.create(sys.argv[1], recipe={}, environment={}, entry={})
append_steps(writer, range(4))
here, there = os.pipe()
child = os.fork()
if child == 0:
    os.write(there, b"1")
    time.sleep(600)
    os._exit(0)
os.read(here, 1)  # the child has begun to run, and with that closed what is not its own
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_outlives_a_killed_run_does_not_keep_its_ledger_locked(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path / "run")], env=environment, stdout=subprocess.PIPE, text=True
    )
    orphan = int(run.stdout.readline())
    try:
        assert run.wait(timeout=600) == -signal.SIGKILL
        os.kill(orphan, 0)  # it is there
        trace = trace_at(tmp_path / "run", 3)
        LedgerWriter.reopen(tmp_path / "run", step=3, trace=trace, environment={}).close()
    finally:
        os.kill(orphan, signal.SIGKILL)
        run.stdout.close()


def test_a_change_of_the_working_directory_moves_no_file(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = LedgerWriter.create("run", recipe={}, environment={}, entry={}, retention=Retention(2))
    append_steps(writer, range(3))
    monkeypatch.chdir(tmp_path / "elsewhere")
    append_steps(writer, range(3, 12), kinds=["weights", "buffers"])
    writer.close()
    assert verify_chain(tmp_path / "run").sound and not list((tmp_path / "elsewhere").iterdir())
