"""OpenVINO GenAI: its continuous batching pipeline over the model that ``checkpoints.py`` converted.

``--dtype`` is bfloat16, or the form of compressed weights (int8, int4), whose activations are bfloat16, too.
"""

from __future__ import annotations

import itertools

import numpy as np
import openvino
import openvino_genai
import protocol


def main() -> None:
    """Load the converted model and answer."""
    given = protocol.arguments()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GiB
    scheduler.max_num_batched_tokens = 4096
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    properties = {"INFERENCE_NUM_THREADS": given.threads, "INFERENCE_PRECISION_HINT": "bf16"}
    folder = f"{given.model}-openvino-{given.dtype}"
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
    numbers = itertools.count()

    def job(prompts: list[list[int]], output_len: int, times: protocol.Times) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            pipeline.add_request(next(numbers), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)
            for prompt in prompts
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for index, handle in enumerate(handles):
                while handle.can_read():
                    times.note(index, sum(len(output.generated_ids) for output in handle.read().values()))

    protocol.answer(openvino_genai.__version__, job)


if __name__ == "__main__":
    main()
