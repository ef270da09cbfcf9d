"""An engine as ``bench.vllm_child`` runs it, which can load LMCache's connector.

``python -m bench.vllm_lmcache PACKAGES``, by the interpreter of vLLM's environment; PACKAGES is
where LMCache's own environment keeps its packages. They come behind those of vLLM, so that the
engine is the same as without them.
"""

from __future__ import annotations

import sys


def mend_llvmlite() -> None:
    """Have llvmlite's libraries deny attributes that they have not.

    LMCache imports numba, and with it llvmlite, whose library object answers every name with a
    function. vLLM's search for CPU kernels asks every module's objects for ``__dict__``, and ends
    at one that is a function.
    """
    from llvmlite.binding import ffi

    answer = ffi._lib_wrapper.__getattr__

    def asked(library: object, name: str) -> object:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return answer(library, name)

    ffi._lib_wrapper.__getattr__ = asked


def main(packages: str) -> None:
    """Serve until the input ends."""
    sys.path.append(packages)
    mend_llvmlite()
    from bench import vllm_child

    vllm_child.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
