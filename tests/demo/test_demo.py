"""The demonstration as a reader runs it: own split, impostor, secret fault, export, bad arguments."""

import hashlib
import subprocess
import sys

import pytest

from det_lightning.demo import EXPECTED_DIGEST, main
from det_lightning.errors import InputError


def demo(*arguments: str) -> tuple[int, list[str]]:
    finished = subprocess.run(
        [sys.executable, "-m", "det_lightning", "demo", *arguments], capture_output=True, text=True
    )
    return finished.returncode, finished.stdout.splitlines()


def test_the_readers_own_split_ends_in_the_expected_digest_and_exports_it(tmp_path):
    arguments = ("--world", "3", "--micro", "5", "--threads", "7", "--order", "shuffled")
    code, lines = demo(*arguments, "--export", str(tmp_path / "weights.f32"))
    assert code == 0
    assert lines[0] == f"expected {EXPECTED_DIGEST}"
    assert lines[-1] == f"reached  {EXPECTED_DIGEST}"
    assert hashlib.sha256((tmp_path / "weights.f32").read_bytes()).hexdigest() == EXPECTED_DIGEST


def test_the_float64_impostor_ends_elsewhere():
    code, lines = demo("--impostor", "float64", "--world", "2")
    assert code == 1
    assert lines[-1].startswith("reached  ") and lines[-1] != f"reached  {EXPECTED_DIGEST}"


def test_the_secret_fault_is_found_from_the_ledgers():
    code, lines = demo("--flip", "secret")
    assert code == 0
    found, drawn = [line.strip() for line in lines if line.strip().startswith("step ")]
    assert found == drawn
    assert "found" in lines


@pytest.mark.parametrize(
    "arguments",
    [
        {"world": 0},
        {"world": 17},
        {"micro": 65},
        {"threads": 0},
        {"order": "random"},
        {"impostor": "float32"},
        {"flip": "public"},
        {"flip": "secret", "impostor": "float64"},
    ],
)
def test_an_argument_out_of_range_is_refused(arguments):
    with pytest.raises(InputError):
        main(**arguments)
