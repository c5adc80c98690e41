"""Makes a byte-level BPE tokenizer.json from the documents of a data configuration.

Key idea: the words are those of a run, and two of its own: `vocab_size=` (tokens, the two special ones included) and
`to=` (the file). What is left out is the default of a run, here the standard library's text and 4096 tokens.
"""

import sys

from tpu_train.config.compose import compose
from tpu_train.config.problems import ConfigError
from tpu_train.data.tokenizer_training import train_tokenizer

USAGE = "scripts/train_tokenizer [data=...] [vocab_size=4096] [to=tokenizer.json]"


def main(words: list[str]) -> int:
    own = {"vocab_size": "4096", "to": "tokenizer.json"}
    if {"-h", "--help"} & set(words):
        print(f"{USAGE}\n\n{__doc__}")
        return 0
    others = []
    for word in words:
        name, _, value = word.partition("=")
        if name in own:
            own[name] = value
        else:
            others.append(word)
    try:
        if not own["vocab_size"].isdecimal():
            raise ValueError(f"vocab_size={own['vocab_size']}: not a number of tokens")
        result = train_tokenizer(compose(others).run.data, int(own["vocab_size"]), own["to"])
    except (ConfigError, ValueError, OSError) as error:
        print(f"{error}\nusage: {USAGE}", file=sys.stderr)
        return 2
    print(f"{result.path}: {result.vocab_size:,} tokens, from {result.num_documents:,} documents")
    print(f"use it with: tokenizer=file tokenizer.path={result.path} model.vocab_size={result.vocab_size}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
