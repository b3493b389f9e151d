"""What the commands do beyond their words: exit codes, streams, imports."""

import io
import os
import subprocess
import sys

import pytest

from det_lightning.cli import exit_codes, printing
from tests.cli.golden_cases import answer
from tests.ledger.example_runs import write_run

COMMAND = [sys.executable, "-m", "det_lightning"]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))} | more


@pytest.mark.parametrize(
    "arguments",
    ["--help", "bisect a middle", "diff a middle", "show a", "verify a --chain", "bisect a nowhere"],
)
def test_reading_ledgers_imports_neither_torch_nor_lightning(ledgers, arguments):
    code = (
        "import sys\n"
        "from det_lightning.cli.app import run\n"
        f"run({arguments.split()!r})\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numba', 'cupy'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ledgers, env=environment(), capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow  # the speed of a machine is no reason to fail elsewhere; what makes it slow is refused above
def test_help_answers_in_well_under_a_second(ledgers):
    before = os.times()
    subprocess.run([*COMMAND, "--help"], cwd=ledgers, env=environment(), capture_output=True, check=True)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    assert used < 0.8


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("bisect a other_world", exit_codes.MATCH),
        ("bisect a middle", exit_codes.DIVERGE),
        ("bisect a other_recipe", exit_codes.CANNOT_JUDGE),
        ("bisect a damaged", exit_codes.CANNOT_JUDGE),
        ("bisect a nowhere", exit_codes.MISUSE),
        ("bisect a", exit_codes.MISUSE),
        ("--nonsense", exit_codes.MISUSE),
    ],
)
def test_the_process_ends_with_the_exit_code_of_the_answer(ledgers, arguments, code):
    done = subprocess.run([*COMMAND, *arguments.split()], cwd=ledgers, env=environment(), capture_output=True)
    assert done.returncode == code
    if code in (exit_codes.MATCH, exit_codes.DIVERGE):
        assert done.stdout and not done.stderr


def test_the_answer_is_plain_ascii_where_the_terminal_knows_no_more(ledgers):
    done = subprocess.run(
        [*COMMAND, "show", "hostile", "--tensors"],
        cwd=ledgers,
        env=environment(PYTHONIOENCODING="ascii", LC_ALL="C"),
        capture_output=True,
    )
    assert done.returncode == exit_codes.MATCH
    assert done.stdout.isascii() and b"\x1b" not in done.stdout


def test_a_reader_that_goes_away_gives_no_traceback(ledgers):
    process = subprocess.Popen(
        [*COMMAND, "show", "long", "--json"],
        cwd=ledgers,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.read(10)
    process.stdout.close()
    assert process.wait() == exit_codes.CANNOT_JUDGE
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_terminal_gets_a_framed_table_and_names_cannot_style_it(beside_ledgers, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "dumb")
    printing.say_table([["[red]name", "1"]], heads=["name", "steps"])
    assert "[red]name" in out.getvalue() and "┃" in out.getvalue()


def test_bisect_takes_paths_with_odd_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "odd [name]\n\x1b[2J"
    write_run(tmp_path / name, 2)
    code, out, _ = answer(["bisect", name, name])
    assert code == exit_codes.MATCH
    assert "odd [name]\\n\\x1b[2J" in out
