"""The recorder of operations: off again whatever happens, and its processes may fail without taking the answer with them."""

import copy
import ctypes
import sys
from pathlib import Path

import pytest
import torch
from det_lightning.callbacks.started_digests import digests_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as torch_modules
from torch.utils._python_dispatch import _get_current_dispatch_mode, _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode

from det_lightning.bisection.operation_log import UNREAD, read_log
from det_lightning.distributed.random_guard import states
from det_lightning.errors import DetError, InputError
from det_lightning.kernels import dispatch
from det_lightning.ledger.digest import tensor_digest
from det_lightning.ops.broadcast import arithmetic
from det_lightning.ops.elementary import det_sigmoid
from det_lightning.ops.gemm import det_gemm
from det_lightning.replay.operation_recorder import OperationRecorder, spell
from det_lightning.replay.sides import Side, SideRunner
from det_lightning.replay.step_recorder import Recording


def everything_is_off() -> bool:
    hooks = len(torch_modules._global_forward_hooks) + len(torch_modules._global_forward_pre_hooks)
    return dispatch.observer is None and hooks == 0 and _get_current_dispatch_mode() is None


def small_network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))


def test_modules_and_forward_operations_are_named_for_the_backward_pass_too(tmp_path):
    network = small_network()
    with OperationRecorder(tmp_path / "log", network).recording() as recorder:
        recorder.phase = "forward"
        loss = network(torch.ones(5, 3)).square().sum()
        recorder.phase = "backward"
        loss.backward()
    log = read_log(tmp_path / "log")
    assert everything_is_off()
    forward = {each.module for each in log if each.phase == "forward" and each.name == "aten.addmm"}
    assert forward == {"0", "2"}
    products = [each for each in log if each.phase == "backward" and each.name == "aten.mm"]
    assert {each.module for each in products} == {"0", "2"}
    for each in products:
        assert log[each.forward].name == "aten.addmm" and log[each.forward].module == each.module
    assert [each.index for each in log] == list(range(len(log)))
    assert all("test_recorder.py" in each.place for each in log if each.phase == "forward")


def test_results_are_the_same_with_the_recorder_and_without(tmp_path):
    def train(record: bool) -> list[bytes]:
        network = small_network()
        optimizer = torch.optim.Adam(network.parameters())
        torch.manual_seed(3)
        for step in range(3):
            recorder = OperationRecorder(tmp_path / f"log-{step}", network)
            with recorder.recording() if record else torch.enable_grad():
                x = torch.nn.functional.dropout(torch.randn(6, 3), 0.25)
                optimizer.zero_grad()
                network(det_gemm(x, torch.eye(3))).square().sum().backward()
                optimizer.step()
        return [parameter.detach().numpy().tobytes() for parameter in network.parameters()]

    assert train(True) == train(False)
    assert "det.gemm.gemm" in {each.name for each in read_log(tmp_path / "log-0")}


def test_backward_passes_of_our_own_operations_are_recorded(tmp_path):
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording() as recorder:
        recorder.phase = "forward"
        loss = arithmetic("mul", det_sigmoid(x), torch.ones(3, 1)).sum()
        recorder.phase = "backward"
        loss.backward()
    names = {each.name for each in read_log(tmp_path / "log") if each.phase == "backward"}
    assert "det.reduction.sum_states" in names and any("elementary" in name for name in names)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_within_switches_everything_off(tmp_path, error):
    network = small_network()

    class Raising(torch.nn.Module):
        def forward(self, x):
            raise error("planted")

    network.append(Raising())
    with pytest.raises(error), OperationRecorder(tmp_path / "log", network).recording():
        network(torch.ones(2, 3))
    assert everything_is_off()
    assert len(read_log(tmp_path / "log")) > 0


def test_a_second_recorder_at_once_is_refused_and_leaves_the_first_on(tmp_path):
    network = small_network()
    with OperationRecorder(tmp_path / "one", network).recording():
        with (
            pytest.raises(DetError, match="one recorder at a time"),
            OperationRecorder(tmp_path / "two", network).recording(),
        ):
            pass
        network(torch.ones(2, 3))
    assert everything_is_off()
    assert "aten.relu" in {each.name for each in read_log(tmp_path / "one")}


def test_memory_that_was_never_written_is_the_same_in_every_pass(tmp_path):
    digests = []
    for number in range(2):
        junk = [torch.full((64,), float(number + 1)) for _ in range(50)]
        del junk
        with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
            torch.empty(64).add_(1.0)
        digests.append(
            [each.inputs[0].digest for each in read_log(tmp_path / "log") if each.name == "aten.add_.Tensor"]
        )
    assert digests[0] == digests[1] and digests[0]


def test_copies_of_memory_are_the_same_in_every_pass(tmp_path, monkeypatch):
    """A deep copy, as Lightning makes of a metric when a number is logged, first gives a tensor memory that nobody wrote."""

    def clone_into(junk):
        def clone(storage):
            fresh = torch.UntypedStorage(storage.nbytes())
            ctypes.memset(fresh.data_ptr(), junk, fresh.nbytes())
            return fresh.copy_(storage)

        return clone

    passes = []
    for junk in (1, 2):
        monkeypatch.setattr(torch.storage._StorageBase, "clone", clone_into(junk))
        with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
            copied = copy.deepcopy(torch.arange(3.0))
        log = read_log(tmp_path / "log")
        passes.append([[value.digest for value in (*each.inputs, *each.outputs)] for each in log])
        assert copied.tolist() == [0, 1, 2]
    assert "aten.set_.source_Storage" in {each.name for each in log}
    assert passes[0] == passes[1]


def test_digests_are_no_operations_of_a_step(tmp_path):
    tensors = {"a": torch.arange(12.0).view(3, 4).t(), "b": torch.ones(2, dtype=torch.complex64), "c": torch.zeros(0)}
    expected = digests_of(tensors)
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
        assert digests_of(tensors) == expected
        assert tensor_digest(tensors["a"]) == expected["a"]
        tensors["c"].add_(1)
    names = [each.name for each in read_log(tmp_path / "log")]
    assert names == ["aten.add_.Tensor"] and everything_is_off()


def test_tensors_without_memory_are_refused_by_digests_and_unread_in_a_step(tmp_path):
    with FakeTensorMode():
        fake = torch.ones(3)
    for digest in (tensor_digest, lambda tensor: digests_of({"x": tensor})):
        with pytest.raises(InputError, match="FakeTensor without memory of its own"):
            digest(fake)
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
        _ = fake * 2
    assert {value.digest for each in read_log(tmp_path / "log") for value in each.outputs} == {UNREAD}


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: FlopCounterMode(display=False)])
def test_modes_of_others_hold_around_digests_while_a_step_is_recorded(tmp_path, mode):
    tensors = {"a": torch.arange(12.0), "b": torch.ones(3, 2)}
    expected = digests_of(tensors)
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording(), mode():
        before = _get_current_dispatch_mode_stack()
        assert digests_of(tensors) == expected and _get_current_dispatch_mode_stack() == before
    assert everything_is_off()


def test_looks_at_random_generators_are_no_operations_of_a_step(tmp_path):
    """They go on between two replays in one process, which would then not repeat each other."""
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
        assert states() == states()
    assert read_log(tmp_path / "log") == [] and everything_is_off()


def test_expanded_and_empty_tensors_and_odd_types_are_read(tmp_path):
    with OperationRecorder(tmp_path / "log", torch.nn.Identity()).recording():
        huge = torch.ones(1).expand(1 << 40)
        assert (huge[:3] + 1).tolist() == [2, 2, 2]
        torch.empty(0, 5).sum(0)
        torch.ones(3, dtype=torch.complex64) * 2
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True).coalesce()
    assert everything_is_off()


def test_arguments_are_spelled_so_that_floats_read_back():
    assert spell([0.1, 1e-8, None, True, torch.ones(2), "x"]) == "[0.1, 1e-08, None, True, tensor, x]"


def test_a_worker_that_ended_before_it_read_its_order_does_not_hide_the_error(tmp_path):
    side = Side(tmp_path, python="/bin/false")
    with SideRunner(tmp_path) as runner:
        runner.start(side)
        (worker,) = runner._workers.values()
        worker.wait(timeout=600)
        worker.stdin.write("an order")


@pytest.mark.parametrize(
    ("python", "cwd", "message"),
    [
        ("nowhere/python", None, "cannot be started"),
        ("/bin/false", None, "without an answer"),
        (sys.executable, "/", "without an answer"),
    ],
)
def test_a_process_of_a_side_that_cannot_answer_is_named(tmp_path, monkeypatch, python, cwd, message):
    if cwd is not None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
        monkeypatch.setenv("PYTHONHOME", "/nowhere")
    side = Side(tmp_path, python=python, cwd=None if cwd is None else Path(cwd))
    with pytest.raises(DetError, match=message), SideRunner(tmp_path) as runner:
        runner.run(side, Recording(1, tmp_path / "out", {}), world=None, accumulate=None)
