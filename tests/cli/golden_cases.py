"""What the command line says, word for word: golden/<name>.txt holds one command, its exit code and both
streams.

After a wanted change of words, run `python -m tests.cli.golden_cases` and read the difference before
committing it.
"""

import contextlib
import io
import os
import tempfile
from pathlib import Path

from det_lightning.cli.app import run
from det_lightning.ledger.retention import Retention
from det_lightning.ledger.store import LedgerWriter
from tests.ledger.example_runs import ENVIRONMENT, NAMES, RECIPE, append_steps, trace_at, write_run

GOLDEN = Path(__file__).parent / "golden"

CASES = {
    "help": "--help",
    "help_bisect": "bisect --help",
    "help_demo": "demo --help",
    "help_diff": "diff --help",
    "help_golden": "golden --help",
    "help_golden_check": "golden check --help",
    "help_golden_record": "golden record --help",
    "help_replay": "replay --help",
    "help_show": "show --help",
    "help_verify": "verify --help",
    "misuse_no_command": "",
    "misuse_unknown_command": "compare a b",
    "misuse_unknown_option": "bisect a b --fast",
    "misuse_missing_ledger": "bisect a",
    "misuse_path_does_not_exist": "bisect a nowhere",
    "misuse_directory_without_ledger": "bisect a not_a_ledger",
    "misuse_file_in_place_of_directory": "show a/ledger.jsonl",
    "misuse_option_out_of_range": "verify a --steps 0",
    "misuse_step_out_of_range": "replay a --to 99",
    "bisect_same_run": "bisect a a",
    "bisect_other_world_size": "bisect a other_world",
    "bisect_first_step": "bisect a first",
    "bisect_middle_step": "bisect a middle",
    "bisect_middle_step_json": "bisect a middle --json",
    "bisect_last_step": "bisect a last",
    "bisect_two_tensors": "bisect a two",
    "bisect_loss": "bisect a loss",
    "bisect_samples": "bisect a samples",
    "bisect_many_tensors": "bisect wide wide_changed",
    "bisect_other_recipe": "bisect a other_recipe",
    "bisect_other_recipe_allowed": "bisect a other_recipe --recipe-may-differ",
    "bisect_unequal_length": "bisect a short",
    "bisect_torn_line": "bisect a torn",
    "bisect_resumed": "bisect a resumed",
    "bisect_fewer_kinds": "bisect a weights_only",
    "bisect_leaves_not_kept": "bisect kept kept_changed",
    "bisect_nothing_in_common": "bisect a empty",
    "bisect_damaged": "bisect a damaged",
    "bisect_junk": "bisect a junk",
    "diff_same_run": "diff a a",
    "diff_middle_step": "diff a middle",
    "diff_middle_step_json": "diff a middle --json",
    "diff_loss_and_recipe": "diff loss other_recipe",
    "diff_nothing_in_common": "diff a empty",
    "show_run": "show a",
    "show_long_run": "show long",
    "show_resumed": "show resumed",
    "show_empty": "show empty",
    "show_step": "show a --step 5",
    "show_tensors": "show a --tensors",
    "show_tensors_not_kept": "show kept --step 6 --tensors",
    "show_step_json": "show a --step 1 --tensors --json",
    "show_missing_step": "show a --step 99",
    "show_names_that_move_the_cursor": "show hostile --tensors",
    "verify_chain_sound": "verify a --chain",
    "verify_chain_sound_json": "verify a --chain --json",
    "verify_chain_resumed": "verify resumed --chain",
    "verify_chain_leaves_dropped": "verify kept --chain",
    "verify_chain_torn": "verify torn --chain",
    "verify_chain_damaged": "verify damaged --chain",
    "verify_chain_damaged_header": "verify junk --chain",
    "verify_chain_empty": "verify empty --chain",
}


def write_scenario(directory: Path) -> None:
    """The ledgers that the cases name."""
    bias, weight = NAMES[2], NAMES[3]

    def at(step, *names, kind="weights"):
        return [(step, kind, name) for name in names]

    write_run(directory / "a", 12)
    write_run(directory / "other_world", 12, environment=ENVIRONMENT | {"world_size": 3})
    write_run(directory / "first", 12, changes=at(0, bias))
    write_run(directory / "middle", 12, changes=at(5, bias))
    write_run(directory / "last", 12, changes=at(12, bias, kind="gradients"))
    write_run(directory / "two", 12, changes=at(5, bias, weight))
    write_run(directory / "loss", 12, fields={step: {"loss": "3fd0000000000000"} for step in (7, 8)})
    write_run(directory / "samples", 12, fields={3: {"sample_ids": "00000000000000ff"}})
    wide = tuple(f"block.{i:02}.weight" for i in range(30))
    write_run(directory / "wide", 2, names=wide)
    write_run(directory / "wide_changed", 2, names=wide, changes=at(2, *wide))
    write_run(directory / "other_recipe", 12, recipe=RECIPE | {"seed": 2, "global_batch": 48})
    write_run(directory / "short", 7)
    write_run(directory / "long", 200)
    write_run(directory / "weights_only", 12, kinds=["weights"])
    write_run(directory / "kept", 12, retention=Retention(2))
    write_run(directory / "kept_changed", 12, retention=Retention(2), changes=at(5, bias))
    write_run(directory / "empty", -1)
    write_run(directory / "torn", 12, close=False)
    cut(directory / "torn/ledger.jsonl", -20)
    write_run(directory / "resumed", 9, close=False)
    cut(directory / "resumed/ledger.jsonl", -20)
    trace = trace_at(directory / "resumed", 6)
    writer = LedgerWriter.reopen(
        directory / "resumed", step=6, trace=trace, environment=ENVIRONMENT | {"world_size": 3}
    )
    append_steps(writer, range(7, 13))
    writer.checkpoint(12, "checkpoints/step=12.ckpt", "")
    writer.close()
    write_run(directory / "damaged", 12)
    content = (directory / "damaged/ledger.jsonl").read_bytes()
    place = content.index(trace_at(directory / "damaged", 12).encode())
    flipped = bytes([content[place] ^ 1])
    (directory / "damaged/ledger.jsonl").write_bytes(content[:place] + flipped + content[place + 1 :])
    (directory / "junk").mkdir()
    (directory / "junk/ledger.jsonl").write_bytes(b"\x00\xff\x1b[2J\n")
    (directory / "not_a_ledger").mkdir()
    write_run(directory / "hostile", 0, kinds=["weights"], names=("\x1b[2Jclear", "[red]line\nbreak", "плюс"))


def cut(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def answer(arguments: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command, run in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = run(arguments)
    return code, out.getvalue(), err.getvalue()


def transcript(command: str) -> str:
    """What a golden file holds for `command`."""
    os.environ["COLUMNS"] = "80"
    code, out, err = answer(command.split())
    parts = [f"$ det-lightning {command}".rstrip(), f"exit code {code}", "--- stdout", out.rstrip("\n")]
    return "\n".join([*parts, "--- stderr", err.rstrip("\n")]) + "\n"


def update() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for path in GOLDEN.glob("*.txt"):
        path.unlink()
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        write_scenario(Path(directory))
        for name, command in CASES.items():
            (GOLDEN / f"{name}.txt").write_text(transcript(command), encoding="utf-8")


if __name__ == "__main__":
    update()
