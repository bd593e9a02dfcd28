"""Sets of sentences as files, and rows of tokens as words."""

import pandas as pd

from fedlib.data.tokenizer import load_tokenizer


def words(row):
    tokenizer = load_tokenizer(None).encoder()
    return [tokenizer.id_to_token(int(i)) for i in row if i]


def write(path, **splits):
    path.mkdir(parents=True, exist_ok=True)
    for split, columns in splits.items():
        pd.DataFrame(columns).to_parquet(path / f"{split}.parquet")
    return path
