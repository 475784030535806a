"""Products of matrices in a process of their own, as a model computes beside a NodeActor's copies.

Kernels of two processes take turns on a GPU: a product in the benchmark's own process would not
show what a copy by a kernel costs.

`python -m raykv.lab.bench.matrices DEVICE SIDE COUNT` multiplies once for each line that it reads,
and writes the milliseconds of each.
"""

from __future__ import annotations

import subprocess
import sys
import time
from types import TracebackType

SIDE, COUNT = 4096, 30
"""bf16: some tens of milliseconds on a GPU of a data centre."""


class MatrixProcess:
    """The process; a call is one round."""

    def __init__(self, device: str = "cuda", side: int = SIDE, count: int = COUNT) -> None:
        """Start it; the first round waits until it is there."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "raykv.lab.bench.matrices", device, str(side), str(count)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> float:
        """Milliseconds of one round.

        Raises:
            RuntimeError: the process has ended; what it said is on standard error.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise RuntimeError("the process that multiplies matrices has ended") from error
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that multiplies matrices has ended")
        return float(answer)

    def __enter__(self) -> MatrixProcess:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def main(device: str, side: int, count: int) -> None:
    """Multiply for each line of standard input."""
    import torch

    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in "lr")
    out = torch.empty_like(left)

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    for _ in sys.stdin:
        wait()
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        wait()
        sys.stdout.write(f"{(time.perf_counter() - began) * 1e3}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
