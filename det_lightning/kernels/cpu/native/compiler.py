"""From a Python function to an object file: the only file that knows Numba's insides.

A kernel is `function(start, stop, *arguments)` on int64 values alone; arrays enter as addresses. Its object file holds
one entry, `int32 <name>(int64 start, int64 stop, const int64 *arguments)`, and calls nothing outside but memory copies.
The entry returns what the kernel returns: a small integer, or 0 for None.
"""

import struct
from collections.abc import Callable
from importlib import import_module

import numba
from llvmlite import binding
from numba import types

_OPTIONS = {"error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False}
_MEMORY_CALLS = {"memcpy", "memset", "memmove"}
_FUSED = ("llvm.fma.", "llvm.fmuladd.")
_ELF_SYMBOL = struct.Struct("<IBBHQQ")


def device_function(function: Callable) -> Callable:
    """Compile `function` as a part of the kernels that call it."""
    return numba.njit(forceinline=True, **_OPTIONS)(function)


def kernel(function: Callable) -> Callable:
    """Mark `function` as a kernel: compiled on demand by `object_code`."""
    return numba.njit(**_OPTIONS)(function)


def _entry(name: str, symbol: str, count: int) -> binding.ModuleRef:
    """A module with the entry `name`, which unpacks `count` arguments and calls `symbol` (Numba's own convention)."""
    loads = [f"%p{i} = getelementptr i64, ptr %arguments, i64 {i}\n%a{i} = load i64, ptr %p{i}" for i in range(count)]
    parameters = ", ".join(
        ["ptr %result", "ptr %error", "i64 %start", "i64 %stop", *(f"i64 %a{i}" for i in range(count))]
    )
    types_only = ", ".join(["ptr", "ptr"] + ["i64"] * (count + 2))
    lines = [
        f'declare i32 @"{symbol}"({types_only})',
        f'define i32 @"{name}"(i64 %start, i64 %stop, ptr %arguments) {{',
        "%result = alloca i64\n%error = alloca ptr\nstore i64 0, ptr %result\nstore ptr null, ptr %error",
        *loads,
        f'%status = call i32 @"{symbol}"({parameters})',
        "%value = load i64, ptr %result\n%answer = trunc i64 %value to i32\nret i32 %answer\n}",
    ]
    return binding.parse_assembly("\n".join(lines))


def object_code(family: str, name: str) -> bytes:
    """Compile the kernel `name` of `native.<family>` for this processor.

    Raises RuntimeError if the machine code would call anything outside itself.
    """
    dispatcher = getattr(import_module(f".{family}", __package__), name)
    count = dispatcher.py_func.__code__.co_argcount
    dispatcher.compile((types.int64,) * count)
    compiled = dispatcher.overloads[dispatcher.signatures[0]]
    machine = compiled.library.codegen._tm
    entry = _entry(name, compiled.fndesc.llvm_func_name, count - 2)
    entry.triple, entry.data_layout = compiled.library._final_module.triple, str(machine.target_data)
    entry.link_in(binding.parse_bitcode(compiled.library._final_module.as_bitcode()))
    for symbol in [*entry.functions, *entry.global_variables]:
        # Kernels share device functions; inside one object file they are nobody else's.
        if not symbol.is_declaration and symbol.name != name:
            symbol.linkage = "internal"
    entry.verify()
    fused = {f.name for f in entry.functions if f.name.startswith(_FUSED)}
    code = machine.emit_object(entry)
    needed = sorted(fused | undefined_symbols(code) - _MEMORY_CALLS)
    if needed:
        raise RuntimeError(
            f"kernel {family}.{name} needs {needed}; kernels may not fuse roundings, call a library, allocate or touch "
            f"Python objects"
        )
    return code


def undefined_symbols(code: bytes) -> set[str]:
    """Names that an ELF object file expects from elsewhere."""
    sections = {section.name(): section.data() for section in binding.ObjectFileRef.from_data(code).sections()}
    symbols, names = sections[b".symtab"], sections[b".strtab"]
    found = set()
    for name_at, _, _, section, _, _ in _ELF_SYMBOL.iter_unpack(symbols):
        if section == 0 and name_at:
            found.add(names[name_at : names.index(b"\0", name_at)].decode())
    return found
