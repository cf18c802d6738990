"""The weights that the engines are compared on, in each engine's own form; made once, kept in a folder.

smollm2-135m: the embedded SmolLM2-135M-Instruct, dequantised to bfloat16. qwen3-0.6b: Qwen3-0.6B's published shape with
random weights (seed 0) and SmolLM2's tokenizer: its speed is that of the real one, its text is not.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from serving import embedded_model

NAMES = ("smollm2-135m", "qwen3-0.6b")
_LLAMA_FILE_TYPES = {"bfloat16": 32, "q4_1": 3}


def make(name: str, folder: Path) -> Path:
    """Write the safetensors checkpoint, unless it is there."""
    target = folder / name
    if not (target / "config.json").exists():
        # A process of its own: this one is to stay small while it measures.
        subprocess.run([sys.executable, __file__, name, str(target)], check=True)
    return target


def convert_for_openvino(checkpoint: Path, python: str) -> None:
    """Write OpenVINO's form beside the checkpoint, unless it is there."""
    target = checkpoint.with_name(f"{checkpoint.name}-openvino")
    if not (target / "openvino_model.xml").exists():
        options = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
        command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        subprocess.run([*command, "--model", str(checkpoint), *options, str(target)], check=True, stdout=sys.stderr)


def convert_for_llamacpp(checkpoint: Path, python: str, dtype: str) -> None:
    """Write llama.cpp's form of the embedded model beside the checkpoint, unless it is there."""
    target = checkpoint.with_name(f"{checkpoint.name}.{dtype}.gguf")
    if not target.exists():
        code = (
            "import ctypes, llama_cpp, sys; llama_cpp.llama_backend_init();"
            "p = llama_cpp.llama_model_quantize_default_params(); p.ftype = int(sys.argv[3]);"
            "p.allow_requantize = True; p.pure = sys.argv[3] == '32';"
            "sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)))"
        )
        file_type = str(_LLAMA_FILE_TYPES[dtype])
        command = [python, "-c", code, embedded_model(), str(target), file_type]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def write(name: str, target: Path) -> None:
    """Make a checkpoint."""
    import torch
    import transformers

    source = Path(embedded_model())
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if name == "smollm2-135m":
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source.parent,
            gguf_file=source.name,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
    else:
        torch.manual_seed(0)
        config = transformers.Qwen3Config(
            hidden_size=1024,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=3072,
            vocab_size=151936,
            tie_word_embeddings=True,
            max_position_embeddings=40960,
            rms_norm_eps=1e-6,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    write(given.name, given.target)
