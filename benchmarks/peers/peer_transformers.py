"""transformers: ``generate`` over one batch of prompts of equal length. ``--model`` may be a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import protocol
import torch
import transformers


def main() -> None:
    """Load the model and answer."""
    given = protocol.arguments()
    torch.set_num_threads(given.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": getattr(torch, given.dtype)}
    path = Path(given.model)
    if path.suffix == ".gguf":
        options |= {"gguf_file": path.name, "quantization_config": transformers.GgufConfig(dequantize=True)}
        path = path.parent
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **options).eval()

    def job(prompts: list[list[int]], output_len: int, times: protocol.Times) -> None:
        class Clock(transformers.StoppingCriteria):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
                for index in range(len(prompts)):
                    times.note(index)
                return torch.zeros(input_ids.shape[0], dtype=torch.bool)

        ids = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            max_new_tokens=output_len, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.inference_mode():
            model.generate(
                ids,
                generation_config=config,
                attention_mask=torch.ones_like(ids),
                stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            )

    protocol.answer(transformers.__version__, job)


if __name__ == "__main__":
    main()
