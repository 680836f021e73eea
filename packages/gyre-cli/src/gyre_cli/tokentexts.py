"""Token ids as text, with a tokenizer that the user names. Only for people: nothing is ever encoded again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gyre_cli.errors import MisuseError


class TokenTexts:
    """Texts of tokens; remembers the piece of every id it has seen."""

    def __init__(self, folder: Path) -> None:
        """`folder` holds a tokenizer.json. Raises MisuseError when there is none that can be read."""
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json" if folder.is_dir() else folder
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise MisuseError(f"{folder} holds no tokenizer.json that can be read: {error}") from None
        self.pieces: dict[int, str] = {}
        """Text of single tokens by id; a token of part of a character is a replacement character."""

    def text(self, ids: np.ndarray) -> str:
        """The text of int32 [n] tokens together, special tokens included."""
        for token in np.unique(ids).tolist():
            if token not in self.pieces:
                known = self._tokenizer.id_to_token(token) is not None
                self.pieces[token] = self._decode([token]) if known else f"[{token}]"
        return self._decode(ids.tolist())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
