"""What a benchmark on a GPU keeps if it is ended, or if one of its parts fails."""

import json

import pytest

torch = pytest.importorskip("torch")

from benchmarks import kernels_on_gpu, surroundings  # noqa: E402


def test_each_row_is_on_disk_before_the_next_is_measured_and_a_part_that_fails_leaves_the_others(tmp_path, monkeypatch):
    target = tmp_path / "result.json"

    def measured(*rows):
        for row in rows:
            yield {"work": row}
            assert json.loads(target.read_text())["digits"][-1] == {"work": row}

    def failing():
        yield {"work": "one"}
        raise RuntimeError("an illegal memory access was encountered")

    parts = {"products": failing, "digits": lambda: measured("a", "b")}
    monkeypatch.setattr(kernels_on_gpu, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(kernels_on_gpu.cuda, "compile_ahead", lambda index, variants: None)
    monkeypatch.setattr(kernels_on_gpu.cuda_compile, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(kernels_on_gpu.sys, "argv", ["kernels_on_gpu.py", str(target), "--no-tests"])
    assert kernels_on_gpu.main() == 1
    found = json.loads(target.read_text())
    assert found["products"] == [{"work": "one"}] and found["digits"] == [{"work": "a"}, {"work": "b"}]
    assert "tests" not in found and "--no-tests" not in found["commit"]
    monkeypatch.setattr(kernels_on_gpu, "PARTS", {"digits": lambda: measured("a")})
    monkeypatch.setattr(kernels_on_gpu.sys, "argv", ["kernels_on_gpu.py", str(target), "abc1234", "--no-tests"])
    assert kernels_on_gpu.main() == 0 and json.loads(target.read_text())["commit"] == "abc1234"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path):
    target = tmp_path / "result.json"
    surroundings.keep(target, {"rows": [1]})
    with pytest.raises(TypeError):
        surroundings.keep(target, {"rows": [object()]})
    assert json.loads(target.read_text()) == {"rows": [1]}
