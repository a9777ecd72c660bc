"""Writes assets/tiny_tokenizer/, the tokenizer of the `tiny` and `small` presets:

    python assets/make_tiny_tokenizer.py

At most 256 ids: the words of a tabletop are one token each, and any other ASCII text is spelt in characters. Like
Llama's, it starts every prompt with `<s>` and marks the start of a word with `▁`; it also ends every prompt in the
empty token `▁`, whose state emits the first action.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

MAX_IDS = 256
SPECIAL = ["<pad>", "<s>", "</s>", "▁", "<unk>"]  # ids 0 to 4
CHARACTERS = [chr(code) for code in range(128) if chr(code) != " " and not chr(code).isupper()]
WORDS = """
    a an the it and or then with
    pick up grasp grab take lift hold push shove slide pull drag move put place set drop release lay stack unstack
    open close turn twist press rotate flip reach touch go bring lower raise insert remove pour wipe
    on onto in into inside out of off to from at by for over under above below between behind before after around near
    next beside left right front back top bottom side middle center corner edge down forward away toward towards
    red green blue yellow purple cyan orange black white gray brown pink small large big
    block blocks cube cubes square ball cylinder bowl plate cup mug box bin tray drawer door handle button lever peg
    hole table basket shelf pot can bottle spoon object target goal zone gripper robot
    advantage positive negative
"""


def main() -> None:
    words = [f"▁{word}" for word in WORDS.split()]
    assert len(set(words)) == len(words)
    pieces = [(piece, -10.0) for piece in SPECIAL + CHARACTERS]
    pieces += [(word, -1.0) for word in words]  # far likelier than being spelt
    assert len(pieces) <= MAX_IDS, len(pieces)

    tokenizer = Tokenizer(Unigram(pieces, unk_id=SPECIAL.index("<unk>")))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Lowercase(), normalizers.Replace(Regex(" +"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A ▁", special_tokens=[("<s>", 1), ("▁", 3)])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    directory = Path(__file__).parent / "tiny_tokenizer"
    wrapped.save_pretrained(directory)
    print(f"{directory}: {len(pieces)} ids, {len(words)} words")


if __name__ == "__main__":
    main()
