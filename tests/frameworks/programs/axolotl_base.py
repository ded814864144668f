"""Make what Axolotl takes from the Hub: a small model and its tokenizer in `base`, and texts in `data.jsonl`."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_models import VOCABULARY, make_model


def main() -> None:
    """Write both into the current folder."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(VOCABULARY - 4))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained("base")
    make_model().save_pretrained("base")
    draw = random.Random(3)
    texts = [" ".join(draw.choices(words[4:], k=draw.randint(8, 15))) for _ in range(64)]
    Path("data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


main()
