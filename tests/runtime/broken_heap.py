"""How torch 2.13 breaks the heap of a gloo rank, and that `collectives` mends it. Run as a script; needs g++.

Both threads of a gloo group note the name of the collective that they finished last in one string, without a lock
(``ProcessGroupGloo::runLoop``). Names of up to 15 characters lie in the string itself; of longer ones both may free the
same memory, and a later malloc of one of them ends the process (``malloc(): unaligned tcache chunk detected``, or a
fault in malloc). This changes nothing but the time at which the threads come there: both at the same tick. Then a
process of one rank, with two gathers under way, dies within seconds, unless they are gathers with a short name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SECONDS = 30.0
SHIM = r"""
#include <cstdint>
#include <dlfcn.h>
#include <string>
#include <x86intrin.h>
namespace c10d { enum class OpType : std::uint8_t {}; std::string opTypeToString(OpType); }
std::string c10d::opTypeToString(c10d::OpType type) {
  static auto torch = dlopen("LIBRARY", RTLD_NOLOAD | RTLD_LAZY);
  static auto real = (std::string (*)(OpType))dlsym(torch, "_ZN4c10d14opTypeToStringB5cxx11ENS_6OpTypeE");
  std::string name = real(type);
  for (uint64_t tick = (__rdtsc() | 0x3fff) + 1; __rdtsc() < tick;) {}
  return name;
}
"""


def gather(seconds: float, mended: bool) -> None:
    """Two gathers at a time, in a group of one rank."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives
    from torch._C._distributed_c10d import HashStore

    if mended:
        import autopar.runtime.collectives  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    ops, group, x, end = torch.ops._c10d_functional, world.group_name, torch.ones(8), time.time() + seconds
    while time.time() < end:
        for raw in [ops.all_gather_into_tensor(x, 1, group) for _ in range(2)]:
            ops.wait_tensor(raw)
    os._exit(0)  # threads that wait for ticks are not waited for


def main() -> int:
    """Run both; 1 where the mended one dies."""
    import torch

    library = Path(torch.__file__).parent / "lib/libtorch_cpu.so"
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        source, shim = Path(folder) / "shim.cpp", Path(folder) / "shim.so"
        source.write_text(SHIM.replace("LIBRARY", str(library)))
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", str(shim), str(source), "-ldl"], check=True)
        for word in ("torch", "mended"):
            started = time.perf_counter()
            command, preload = [sys.executable, __file__, word], {"LD_PRELOAD": str(shim)}
            run = subprocess.run(command, env=os.environ | preload, check=False)
            print(f"{word}: exit code {run.returncode} after {time.perf_counter() - started:.0f} s")
            code |= word == "mended" and run.returncode != 0
    return code


if __name__ == "__main__":
    if len(sys.argv) > 1:
        gather(SECONDS, sys.argv[1] == "mended")
    sys.exit(main())
