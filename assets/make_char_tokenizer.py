"""Writes assets/char_tokenizer/, the tokenizer of the `tiny` and `small` language models:

    python assets/make_char_tokenizer.py

One id per printable ASCII character and newline; anything else is `<unk>`. Nothing is added to a text; `</s>` ends a
response. The chat template writes a conversation as one would on paper: messages a line each, an answer ends in `</s>`.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]  # ids 0 to 3
CHARACTERS = ["\n", *map(chr, range(32, 127))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %}{{ '\\n' }}{% endif %}{% endfor %}"
)


def main() -> None:
    vocabulary = {token: index for index, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )
    directory = Path(__file__).parent / "char_tokenizer"
    wrapped.save_pretrained(directory)
    print(f"{directory}: {len(vocabulary)} ids")


if __name__ == "__main__":
    main()
