"""`sanitized.py` launches every kernel, seen without a GPU: launches are noted, and what they would compute is not."""

import re

import pytest

torch = pytest.importorskip("torch")

from torch.overrides import TorchFunctionMode  # noqa: E402

from det_lightning.kernels import (  # noqa: E402
    cuda_chain,
    cuda_compile,
    cuda_digest,
    cuda_digest_batch,
    cuda_elementary,
    cuda_gemm,
    cuda_gemm_windowed,
    cuda_paths,
    cuda_planner,
    cuda_reduction,
    cuda_scatter,
    cuda_windowed_digits,
    dispatch,
)

from . import sanitized  # noqa: E402

MODULES = (
    cuda_digest, cuda_digest_batch, cuda_elementary, cuda_gemm, cuda_gemm_windowed, cuda_reduction, cuda_scatter,
    cuda_windowed_digits,
)  # fmt: skip
# What a sum of nothing but noted launches never comes to: words that have to be long, elements that are left over.
NOT_HERE = {"gemm_elements", "windowed_round_long"}
OF_TESTS_ALONE = {"digits_add"}


class OnCpu(TorchFunctionMode):
    """What is meant for a GPU is made on the CPU, and is zero where it is empty."""

    def __torch_function__(self, function, types, arguments=(), options=None):
        options = dict(options or {})
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return (torch.zeros if function is torch.empty else function)(*arguments, **options)


def test_every_kernel_is_launched(monkeypatch):
    launched = set()

    class Chain(cuda_chain.Chain):
        def __init__(self, index, calls, changing, fixed):
            self.calls = calls

        def launch(self, *changing):
            launched.update(call.kernel for call in self.calls)

    def launch(device, source, kernel, blocks, threads, *arguments):
        assert min(blocks) > 0, f"{kernel} with {blocks} blocks"
        launched.add(kernel)

    def launch_all(device, calls):
        for call in calls:
            launch(device, call.source, call.kernel, call.blocks, call.threads)

    for module in MODULES:
        for name, stand_in in (
            ("launch", launch),
            ("launch_all", launch_all),
            ("multiprocessors", lambda index: 132),
            ("engine_of", lambda index: "int8"),
        ):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    monkeypatch.setattr(cuda_digest_batch, "_table_on", lambda device, rows: torch.tensor(rows))
    monkeypatch.setattr(cuda_windowed_digits, "_table", lambda operands, device: torch.zeros(1))
    monkeypatch.setattr(cuda_paths, "Chain", Chain)
    monkeypatch.setattr(cuda_paths, "capability", lambda index: (9, 0))
    monkeypatch.setattr(cuda_paths, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(cuda_paths, "most_shared_bytes", lambda index: 232_448)
    monkeypatch.setattr(cuda_planner.Plan, "send", lambda *_: None)
    monkeypatch.setattr(dispatch, "_device_type", lambda *_: "cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    cuda_gemm._known.sites.clear()
    try:
        with OnCpu():
            sanitized.streams()
            sanitized.products()
    finally:
        cuda_gemm._known.sites.clear()
        cuda_gemm_windowed._known.prepared.clear()
        cuda_planner._plans.clear()
    text = "".join(path.read_text(encoding="utf-8") for path in cuda_compile.sources())
    kernels = set(re.findall(r"__global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\(", text))
    assert kernels - launched <= NOT_HERE | OF_TESTS_ALONE and {"scatter_large", "residue_windowed"} <= launched
