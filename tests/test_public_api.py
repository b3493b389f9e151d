"""What users may rely on: these names and commands. Changing a list here is changing the product."""

import re
import sys

import pytest

import det_lightning

PUBLIC_NAMES = [
    "DetLinear",
    "DetStrategy",
    "FabricDetStrategy",
    "FaultGuard",
    "LedgerGuard",
    "PlainLedger",
    "ReplicaGuard",
    "WeightLedger",
    "check_golden",
    "det_all_reduce",
    "det_combine",
    "det_exp",
    "det_finalize",
    "det_gemm",
    "det_gemm_partial",
    "det_log",
    "det_sum",
    "exact_mean",
    "random",
]
COMMANDS = ["bisect", "demo", "diff", "golden", "replay", "show", "verify"]


def test_the_public_names_are_these():
    assert sorted(det_lightning.__all__) == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_resolves_and_says_what_it_is(name):
    assert getattr(det_lightning, name).__doc__


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AttributeError, match="DetStrategy"):
        det_lightning.det_gem  # noqa: B018


def test_the_commands_are_these(monkeypatch, capsys):
    from det_lightning.cli import main

    monkeypatch.setattr(sys, "argv", ["det-lightning", "--help"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    listed = capsys.readouterr().out.partition("Commands")[2]
    assert sorted(re.findall(r"^(?:│ |  )([a-z-]+)\b", listed, re.MULTILINE)) == COMMANDS
