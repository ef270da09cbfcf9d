"""What a worker of vLLM's CPU build lacks to be a later stage of a pipeline.

vLLM makes the room for what a stage receives in a dummy run, which its CPU worker leaves out where
nothing is compiled. Loaded by ``worker_extension_cls`` into each worker.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_pp_group


class Stage:
    """Becomes a base of vLLM's worker class."""

    model_runner: Any

    def make_room(self) -> bool:
        """Do what the dummy run does; call once, before the first request."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=runner.device,
            )
        return True
