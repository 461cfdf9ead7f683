"""llama.cpp's converter for the demo's target, whose tokenizer it doesn't know by its hash: it is GPT-2's.

Runs as the converter itself: the folder of llama.cpp is in OUTRIDER_LLAMA_CPP.
"""

import os
import runpy
import sys
from pathlib import Path

folder = Path(os.environ["OUTRIDER_LLAMA_CPP"])
sys.path[:0] = [str(folder), str(folder / "gguf-py")]
from conversion.base import TextModel  # noqa: E402

TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(str(folder / "convert_hf_to_gguf.py"), run_name="__main__")
