"""`make bench`: every benchmark, one after another; exits 1 when a figure misses its limit."""

from __future__ import annotations

import importlib
import os
import platform
import sys

BENCHMARKS = (
    "startup",
    "stats_cost",
    "engine_overhead",
    "low_memory",
    "resume_rate",
    "score_rate",
    "workspaces",
    "mock_ceiling",
    "transports",
    "endpoint_rate",
    "endpoint_streams",
    "endpoint_many",
    "auto_ceiling",
    "gateway",
    "report_page",
    "side_by_side",
    "worker_processes",
    "ray_scale",
    "ray_worker",
)


def machine() -> str:
    """What these figures were measured on."""
    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark is named {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    print(f"on {machine()}")
    missed = 0
    for name in names or BENCHMARKS:
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"{name}: {(module.__doc__ or '').splitlines()[0]}", flush=True)
        for row in module.measure():
            print(row, flush=True)
            missed += not row.ok
    print(f"{missed} missed" if missed else "all within their limits")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
