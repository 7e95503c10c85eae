"""What the processes of a queue share on a GPU: compiled code, and NVIDIA's MPS."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cosmos_lab.io import atomic_write


@contextmanager
def compile_cache(archive: Path | None, folder: Path) -> Iterator[None]:
    """Unpack compiled code of an earlier machine, and write the archive again at the end."""
    if archive is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    if archive.exists():
        try:
            shutil.unpack_archive(archive, folder, "gztar", filter="data")
        except (shutil.ReadError, EOFError, OSError, zlib.error) as error:
            print(f"{archive} is damaged and is made again ({error!r})", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {f"{name}_CACHE_DIR": str(folder.resolve() / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    try:
        yield
    finally:
        # At level 1, 100 MB take 1 s; at gzip's usual level 13 s, which nobody expects after the deadline.
        with atomic_write(archive) as out, tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as packed:
            packed.add(folder, ".")
        shutil.rmtree(folder)


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[Callable[[], None] | None]:
    """Run NVIDIA's MPS daemon, so that kernels of several processes run at the same time.

    Yield a function that starts the daemon again, or None without MPS. Processes that share a GPU by MPS share errors
    too: after an illegal address in one, all of them fail, and new ones as well until the last of these has ended.
    """
    if not wanted:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:

        def start() -> None:
            one = tempfile.mkdtemp(dir=folder)  # for each daemon: an earlier one may not have ended
            os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": one, "CUDA_MPS_LOG_DIRECTORY": one}
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)

        def stop() -> None:
            with suppress(subprocess.TimeoutExpired):  # all clients have ended, so there is nothing to wait for
                subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True, timeout=5)

        def restart() -> None:
            stop()
            start()

        start()
        try:
            yield restart
        finally:
            stop()
