"""Tables of docs/measured.md on what a training adds: the exchange of gradients, whole steps, ledgers and guards."""

from benchmarks.tables.recorded import load, origin


def exchange_on_gpus() -> str:
    result = load("reducer-on-gpus.json")
    rows = [
        f"| {row['work']} | {row['ratio']} | {row['target']} | {row['ours_ms']} ms | {row['moving_alone_ms']} ms "
        f"| {row['stock_ms']} ms |"
        for row in result["rows"]
    ]
    return (
        "Beside one NCCL all-reduce of the same number of float32 elements, which rounds at every addition.\n\n"
        "| work | ratio | aim | exact | its collectives alone | NCCL |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def training_steps() -> str:
    result = load("training-step-gpu.json")
    rows = [
        f"| {row['work']} | {row['ratio']} | {row['ours_ms']} ms | {row['stock_ms']} ms | {row['memory_GB']} GB |"
        for row in result["rows"]
    ]
    return (
        '`strategy="det"` beside `strategy="auto"` in float32 on one GPU, by the clock; the batches lie there already.'
        "\n\n| work | ratio | det | auto | most memory |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(result)}</sub>"
    )


def ledger_costs() -> str:
    gpu, cpu, guard = load("ledger-h200.json"), load("ledger-cpu.json"), load("fault-guard-cpu.json")
    recording, aims = gpu["recording"], gpu["aims"]
    rows = [
        f"| {row['tensors']} | {row['share_of_copy_percent']} % | {row['digest_GB_per_s']} GB/s |"
        for row in gpu["digests"]
    ]
    commands = ", ".join(f"`{name}` {found['median_s']:.1f} s" for name, found in cpu["commands"].items())
    return (
        f"A step of {recording['model']}, {recording['batch']}, {recording['digested_bytes_a_step'] / 1e9:.1f} GB digested: "
        f"with a ledger of all kinds {recording['ledger_overhead_percent']} % longer (aim "
        f"{aims['ledger_overhead_percent']} %), with roots alone {recording['ledger_of_roots_overhead_percent']} %.\n\n"
        f"| digests of | of a copy's bandwidth (aim {aims['digest_share_of_copy_percent']} %) | rate |\n|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n<sub>{origin(gpu)}</sub>\n\n"
        f"Two ledgers of {cpu['ledgers']['steps']:,} steps of {cpu['ledgers']['tensors']} tensors that part in the middle: "
        f"{commands}, the start of the interpreter included (aim 2 s). Digests on one CPU core: "
        f"{cpu['digest']['memory_GB_per_s']} GB/s from memory, {cpu['digest']['cache_GB_per_s']} GB/s from the cache "
        f"(aim 2).\n\n<sub>{origin(cpu)}</sub>\n\n"
        f'`FaultGuard` on a CPU, {guard["work"]}, `strategy="det"`: a step in which memory is '
        f"compared takes {guard['memory_percent']} % more, one in which everything is {guard['all_percent']} % more; with "
        f"everything at every tenth step that is {guard['all_every_10_percent']} % on average.\n\n"
        f"<sub>{origin(guard)}</sub>"
    )
