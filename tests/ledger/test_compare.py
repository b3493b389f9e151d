import pytest

from det_lightning.errors import LedgerError
from det_lightning.ledger.compare import (
    FieldDifference,
    HeaderDifference,
    TensorDifference,
    difference_at,
    flat_header,
    header_differences,
)
from det_lightning.ledger.store import LedgerReader
from tests.ledger.example_runs import ENVIRONMENT, RECIPE, write_run


def readers(*paths):
    return [LedgerReader(path) for path in paths]


def test_headers_are_compared_in_order_of_likelihood_down_to_the_entry_that_differs(tmp_path):
    recipe = RECIPE | {"seed": 2, "model": {"digest": "77", "layers": 3}}
    environment = ENVIRONMENT | {"world_size": 3}
    a, b = readers(
        write_run(tmp_path / "a", 1),
        write_run(tmp_path / "b", 1, recipe=recipe, environment=environment),
    )
    assert header_differences(a, b) == (
        HeaderDifference("recipe", "seed", "1", "2"),
        HeaderDifference("recipe", "model.digest", '"5f3a"', '"77"'),
        HeaderDifference("recipe", "model.layers", None, "3"),
        HeaderDifference("environment", "world_size", "1", "3"),
    )
    assert header_differences(a, a) == ()


def test_a_step_is_compared_by_fields_then_roots_then_tensors(tmp_path):
    a, b = readers(
        write_run(tmp_path / "a", 4),
        write_run(
            tmp_path / "b",
            4,
            changes=[(3, "weights", "layer.2.bias")],
            fields={3: {"loss": "0" * 16, "extra": 1}},
        ),
    )
    name = "layer.2.bias"
    ours, theirs = (reader.leaves(reader.record(3), "weights")[name] for reader in (a, b))
    found = difference_at(a, b, 3, last_match=2)
    assert (found.step, found.last_match, found.found) == (3, 2, True)
    assert found.fields == (
        FieldDifference("extra", None, "1"),
        FieldDifference("loss", '"3fd5555555555555"', '"0000000000000000"'),
    )
    assert [each.name for each in found.roots] == ["weights"]
    assert found.tensors == (TensorDifference("weights", name, ours, theirs),)
    assert found.agreeing == ("epoch", "learning_rates", "sample_bytes", "sample_ids", "step", "gradients")
    assert not difference_at(a, b, 2).found


def test_a_tensor_that_only_one_run_has_is_a_difference(tmp_path):
    a, b = readers(
        write_run(tmp_path / "a", 1, kinds=["weights"], names=("x", "y")),
        write_run(tmp_path / "b", 1, kinds=["weights"], names=("x", "z")),
    )
    tensors = difference_at(a, b, 1).tensors
    assert [(each.name, each.reference is None, each.candidate is None) for each in tensors] == [
        ("y", False, True),
        ("z", True, False),
    ]


def test_what_only_one_run_recorded_is_no_difference_of_the_runs(tmp_path):
    a, b = readers(write_run(tmp_path / "a", 1), write_run(tmp_path / "b", 1, kinds=["weights"]))
    found = difference_at(a, b, 1)
    assert not found.found
    assert [(each.name, each.one_sided) for each in found.roots] == [("gradients", True)]


def test_roots_without_leaves_are_named_as_such(tmp_path):
    roots = {1: {"roots": {"buffers": "11" * 32}}}
    a, b = readers(
        write_run(tmp_path / "a", 1, fields=roots),
        write_run(tmp_path / "b", 1, fields={1: {"roots": {"buffers": "22" * 32}}}),
    )
    found = difference_at(a, b, 1)
    assert (found.kinds_without_leaves, found.tensors) == (("buffers",), ())


def test_a_kind_without_a_tensor_neither_agrees_nor_lacks_its_leaves(tmp_path):
    a, b = readers(write_run(tmp_path / "a", 1, names=()), write_run(tmp_path / "b", 1, names=()))
    assert not {"weights", "gradients"} & set(difference_at(a, b, 1).agreeing)
    (c,) = readers(write_run(tmp_path / "c", 1, names=("x",), kinds=["weights"]))
    found = difference_at(a, c, 1)
    assert ([each.name for each in found.tensors], found.kinds_without_leaves) == (["x"], ())


def test_leaves_that_do_not_have_the_recorded_root_are_not_believed(tmp_path):
    path = write_run(tmp_path / "b", 1, changes=[(1, "weights", "layer.2.bias")])
    a, b = readers(write_run(tmp_path / "a", 1), path)
    content = bytearray((path / "leaves-weights.bin").read_bytes())
    content[-1] ^= 1
    (path / "leaves-weights.bin").write_bytes(bytes(content))
    with pytest.raises(LedgerError, match=r"leaves-weights\.bin is damaged"):
        difference_at(a, b, 1)


def test_a_header_is_flat_down_to_the_setting_that_differs():
    header = {
        "optimizers": [{"class": "SGD", "groups": [{"lr": "3fa9"}, {"betas": ["1", "2"]}]}],
        "none": {},
        "list": [],
    }
    assert flat_header(header) == {
        "optimizers.0.class": '"SGD"',
        "optimizers.0.groups.0.lr": '"3fa9"',
        "optimizers.0.groups.1.betas": '["1","2"]',
        "none": "{}",
        "list": "[]",
    }
