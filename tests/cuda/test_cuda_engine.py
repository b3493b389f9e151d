"""Which engine "auto" is, without a GPU."""

import pytest

torch = pytest.importorskip("torch")

from det_lightning.errors import InputError  # noqa: E402
from det_lightning.kernels import cuda, cuda_engine  # noqa: E402


@pytest.fixture
def on(monkeypatch):
    """(capability, value of the environment variable) -> what "auto" is."""

    def engine(capability: tuple[int, int], value: str | None = None) -> str:
        monkeypatch.setattr(cuda, "capability", lambda index: capability)
        if value is None:
            monkeypatch.delenv(cuda_engine.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(cuda_engine.VARIABLE, value)
        cuda_engine.engine_of.cache_clear()
        return cuda_engine.engine_of(0)

    yield engine
    cuda_engine.engine_of.cache_clear()


def test_the_engine_with_fewer_seconds_a_product_is_chosen():
    assert cuda_engine.faster_engine(4096, 128) == "int8"
    assert cuda_engine.faster_engine(2, 128) == cuda_engine.faster_engine(64, 64) == "float64"
    # Four products of float64 take as long as eleven of int8 at 4 / 11 of the rate.
    assert cuda_engine.faster_engine(1100, 401) == "float64" and cuda_engine.faster_engine(1100, 399) == "int8"


def test_every_device_that_is_known_and_any_other_takes_int8(on):
    for capability in (*cuda_engine._RATES, (8, 7), (13, 0)):
        assert on(capability) == "int8"


def test_the_environment_variable_decides(on):
    assert on((9, 0), "float64") == "float64" and on((9, 0), "int8") == on((9, 0), "") == "int8"
    with pytest.raises(InputError, match="DET_LIGHTNING_CUDA_ENGINE is 'tf32'; allowed: int8, float64"):
        on((9, 0), "tf32")


def test_a_device_that_float64_is_faster_on_takes_it(on, monkeypatch):
    monkeypatch.setitem(cuda_engine._RATES, (99, 0), (8, 128))
    assert on((99, 0)) == "float64" and on((99, 0), "int8") == "int8"
