"""Tables of docs/measured.md on products and streams, on CPU and GPU."""

from benchmarks.tables.recorded import load, origin


def measured_on_cpu() -> str:
    cpu, repdl = load("cpu-arithmetic.json"), load("against-repdl.json")
    theirs, ours = repdl["rows"][0], repdl["rows"][1]
    rows = [f"| {row['work']} | {row['ratio']:.1f} | {row['target'] or ''} | {row['against']} |" for row in cpu["rows"]]
    return (
        "Time as a multiple of the stock operation in the same process, medians of seven.\n\n"
        "| work | ratio | aim | against |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(cpu)}</sub>\n\n"
        + f"Beside RepDL's reproducible CPU product, {theirs['work'].removeprefix('repdl ')}: `det_gemm` is "
        f"{ours['repdl_over_this']:.0f} times as fast, with a largest error of {ours['largest_error']:.1e} instead of "
        f"{theirs['largest_error']:.1e} (relative to the exact value or to 1).\n\n<sub>{origin(repdl)}</sub>"
    )


def products_on_gpu() -> str:
    result = load("kernels-h200.json")
    rows = [
        f"| {row['data']} {row['product']}, {row['output']} out | {row['path']} | {row['moduli']} | {row['ratio']:.2f} "
        f"| {row['bound'] or ''} | {row['ratio_eager']:.2f} | {row['ratio_det_matmul_eager']:.2f} "
        f"| {row['ratio_to_bfloat16']:.1f} | {row['tops']:.0f} |"
        for row in result["products"]
    ]
    windows = [
        f"| {row['data']}, {row['work'].split()[2].rstrip(',')} | {row['words']} | {row['ratio_to_float32']:.2f} | "
        f"{row['ratio_eager']:.2f} |"
        for row in result["digits"]
        if "ratio_to_float32" in row and "data" in row
    ]
    other_engine = [
        f"| {row['data']} {row['work'].split()[2]} | {row['moduli']} | {row['ratio_to_int8_engine']:.1f} | "
        f"{row['ratio_to_cublas_float32']:.1f} | {row['ratio_to_cublas_float64']:.1f} | {row['tflops']:.0f} |"
        for row in result["float64"]
    ]
    tests = result["tests"]
    return (
        "Time as a multiple of cuBLAS float32 (TF32 off) in the same process, small products as replays of a CUDA graph; "
        "the columns after it are single calls from Python, of the kernels and of `det_matmul` with its checks. "
        f"{tests['passed']} tests compared bytes with the CPU, {len(tests['not_passed'])} failed.\n\n"
        "| product | path | moduli | ratio | aim | single | `det_matmul` | of cuBLAS bfloat16 | int8 TOPS inside |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n\n| windowed digits of a 4096^3 product | words | times the float32 product (aim 1.15) | single calls |\n"
        "|---|---|---|---|\n"
        + "\n".join(windows)
        + "\n\n| the float64 engine instead of int8 | moduli | times int8 | times cuBLAS float32 | times cuBLAS float64 | "
        "TFLOP/s |\n|---|---|---|---|---|---|\n" + "\n".join(other_engine) + f"\n\n<sub>{origin(result)}</sub>"
    )


def streams_on_gpu() -> str:
    result = load("streams-h200.json")
    rows = [f"| {row['work']} | {100 * row['share_of_copy']:.0f} % | {aim(row['aim'])} |" for row in result["rows"]]
    return (
        "Bytes read and written over time, as a share of what a copy of 1 GiB reaches in the same process; 2^28 float32 "
        "numbers unless said.\n\n| operation | of a copy | aim |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def aim(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
