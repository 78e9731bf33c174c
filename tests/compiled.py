"""Kernels compiled without a card: what they would take of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

# What the kernels' arguments are, where a name does not say it.
_KINDS = {
    "table_ptr": "*i32", "position_ptr": "*i32", "first_part_ptr": "*i32", "item_ptr": "*i32",
    "part_ptr": "*fp32", "lse_ptr": "*fp32", "slot_ptr": "*i64", "row_ptr": "*i64",
    "left_row_ptr": "*i64", "left_ptr": "*fp32", "allowed_ptr": "*i32", "stream_ptr": "*i64",
    "drawn_at_ptr": "*i64", "greedy_ptr": "*i64", "early_ptr": "*fp64", "late_ptr": "*fp64",
    "moment_ptr": "*fp32", "best_ptr": "*i32", "threshold_ptr": "*fp32", "last_ptr": "*i64",
    "scale": "fp32", "softcap": "fp32", "eps": "fp32", "scaling": "fp32", "shift": "fp32",
    "frequency_ptr": "*fp32",
}  # fmt: skip

_COMPILE = """
import importlib, json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, fixed, kinds, capability = json.loads(sys.argv[1])
function = getattr(importlib.import_module("weft.engines.torch." + module), name)
options = {name: fixed.pop(name) for name in ("num_warps", "num_stages") if name in fixed}
names = function.arg_names
kinds = {n: kinds.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
unknown = {each.name for each in function.params if each.do_not_specialize}
aligned = [
    i for i, n in enumerate(names) if n not in fixed and n not in unknown
    and (n.endswith(("_ptr", "_stride")) or n.startswith("q_"))
]
source = ASTSource(
    function,
    {n: "constexpr" if n in fixed else kinds[n] for n in names},
    {(names.index(n),): value for n, value in fixed.items()},
    {(i,): [["tt.divisibility", 16]] for i in aligned},
)
binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
ptx, tool = binary.asm["ptx"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(binary.asm["cubin"])
    file.flush()
    usage = subprocess.check_output([tool, "--dump-resource-usage", file.name], text=True)
    sass = subprocess.check_output([tool.with_name("nvdisasm"), "-c", file.name], text=True)
stack, registers = (int(re.search(n + ":([0-9]+)", usage)[1]) for n in ("STACK", "REG"))
waits = [int(n) for n in re.findall("cp.async.wait_group\\s+([0-9]+)", ptx)]
values = [binary.metadata.shared, "wgmma" in ptx, "mma.sync" in ptx, stack, registers]
is_serial = 0 < sass.count("HGMMA") <= sass.count("WARPGROUP.DEPBAR")
n_narrow = len(re.findall("ld.global[.a-z_]*[.]b16", ptx))
n_approximate = len(re.findall("(?:sin|cos)[.]approx", ptx))
counts = n_approximate, n_narrow
print(json.dumps([*values, max(waits, default=0), is_serial, *counts]))
"""


class Compiled(NamedTuple):
    """Resources and instructions of one compiled kernel.

    shared: bytes of shared memory. stack: bytes per thread that did not fit into registers.
    ahead: copies into shared memory that may still run when the kernel waits for earlier ones.
    is_serial: the kernel waits for each product of a warp group before the next. approximations:
    approximated sines and cosines. narrow: loads of two bytes per thread.
    """

    shared: int
    has_wgmma: bool
    has_mma: bool
    stack: int
    registers: int
    ahead: int
    is_serial: bool
    approximations: int
    narrow: int


def compiled(
    module: str, name: str, fixed: dict[str, Any], *, capability: int = 90, **kinds: str
) -> Compiled:
    """Compile a kernel of `weft.engines.torch`, in a process that has no interpreter.

    fixed: its constants, with num_warps and num_stages. capability: 90 of an H100 or H200, 80 of an
    A100, 89 of an RTX 4090, …. kinds: types of pointers that are neither bfloat16 nor in `_KINDS`:
    "fp32", ….
    """
    named = {**_KINDS, **{key: f"*{kind}" for key, kind in kinds.items()}}
    request = json.dumps([module, name, fixed, named, capability])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COMPILE, request],
        env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return Compiled(*json.loads(done.stdout))
