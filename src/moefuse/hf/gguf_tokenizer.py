"""The tokenizer that a GGUF file describes, as a transformers tokenizer.

A file names its kind (``tokenizer.ggml.model``), and for byte-level BPE how text is split before the merges
(``tokenizer.ggml.pre``). A kind or split that is not in these tables is refused: its tokens would be wrong unnoticed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from moefuse.quant.gguf import GGUFFile, brief

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
# Far above any model's: letters of a piece that is joined from two others, and of all tokens that are kept whole.
_MAX_PIECE, _MAX_WHOLE = 256, 2**20

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|{_WORDS}\p{{L}}+|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORDS}\p{{L}}+|\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = rf"{_ENDINGS}|{_WORDS}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"{_WORDS}{_UPPER}*{_LOWER}+{_ENDINGS}?|{_WORDS}{_UPPER}+{_LOWER}*{_ENDINGS}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_TEKKEN = rf"{_WORDS}{_UPPER}*{_LOWER}+|{_WORDS}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_HAN, _KANA = "\u4e00-\u9fa5", "\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
# Letters of the scripts that have cases, as DeepSeek lists them.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-"
    "\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-"
    "\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-"
    "\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_SIGNS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_OTHERS = f"{_HAN}\u0800-\u4e00\uac00-\ud7ff"
_DEEPSEEK = (
    r"[\r\n]", rf"\s?[{_CASED}]+", rf"\s?[{_DEEPSEEK_SIGNS}]+", r"\s+$", f"[{_DEEPSEEK_OTHERS}]+", r"\p{N}+",
)  # fmt: skip

#: ``tokenizer.ggml.pre`` -> how text is split, one expression after the other
_SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "granite-docling"), (_GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "dbrx", "smaug-bpe"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (_QWEN2,)),
    **dict.fromkeys(("refact", "starcoder", "smollm", "command-r"), (r"\p{N}", _GPT2)),
    "qwen35": (_QWEN35,),
    "gpt-4o": (_GPT4O,),
    "tekken": (_TEKKEN,),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-v3": (r"\p{N}{1,3}", f"[{_HAN}{_KANA}]+", _DEEPSEEK3),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_BEGIN_WITH_BOS = ("llama3", "llama-v3", "llama-bpe")


class _Given:
    """A tokenizer of our own making. transformers copies what it is given, which took longer than to make it."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend

    def __deepcopy__(self, _memo: Any) -> Tokenizer:
        return self.backend


def read_tokenizer(file: GGUFFile) -> Any:
    """The tokenizer of a file; a ValueError says what is missing or not known."""
    from transformers import PreTrainedTokenizerFast

    data = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in file.metadata.items()
        if key.startswith("tokenizer.ggml.")
    }
    kind, tokens = data.get("model"), _strings(data, "tokens")
    if not tokens:
        raise ValueError(f"from_gguf: {file.path.name} must hold a tokenizer (tokenizer.ggml.tokens), got none")
    _refuse_other_kinds(data, file)
    types = _numbers(data, "token_type", tokens)
    if kind == "gpt2":
        backend = _byte_level(data, tokens)
    elif kind in ("llama", "gemma4"):
        backend = _sentencepiece(data, tokens, kind)
    else:
        raise ValueError(f"from_gguf: tokenizer.ggml.model must be gpt2, llama or gemma4, got {brief(kind)}")
    marked = [] if types is None else list(zip(tokens, types.tolist(), strict=True))
    whole = sum(len(token) for token, type in marked if type in (_CONTROL, _USER_DEFINED))
    if whole > _MAX_WHOLE:
        raise ValueError(f"from_gguf: control tokens must have at most {_MAX_WHOLE} letters together, got {whole}")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token, type in marked if type == _CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, type in marked if type == _USER_DEFINED])
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = data.get(f"{key}_token_id")
        # No token, or one without letters, is how some files say "none".
        if type(number) is int and 0 <= number < len(tokens) and tokens[number]:
            special[f"{name}_token"] = tokens[number]
    _begin_and_end(backend, data, special)
    context = file.metadata.get(f"{file.architecture}.context_length")
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        tokenizer_object=_Given(backend),
        **special,
        chat_template=file.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=context if type(context) is int and context > 0 else None,
    )


def _strings(data: dict[str, Any], name: str) -> list[str] | None:
    """A key's strings, None where the file has none."""
    found = data.get(name)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"from_gguf: tokenizer.ggml.{name} must be strings, got {brief(found)}")
    return found


def _numbers(data: dict[str, Any], name: str, tokens: list[str]) -> np.ndarray[Any, Any] | None:
    """A key's numbers, one for each token; None where the file has none."""
    found = data.get(name)
    if found is not None and not (isinstance(found, np.ndarray) and len(found) == len(tokens)):
        got = len(found) if isinstance(found, np.ndarray) else brief(found)
        raise ValueError(f"from_gguf: tokenizer.ggml.{name} must be {len(tokens)} numbers, one a token, got {got}")
    return found


def _refuse_other_kinds(data: dict[str, Any], file: GGUFFile) -> None:
    """What is taken as it stands must be of the kind that its key has."""
    kinds = dict.fromkeys(("model", "pre"), str) | dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_space_prefix"), bool
    )
    values = [(f"tokenizer.ggml.{name}", data.get(name), kind) for name, kind in kinds.items()]
    values.append(("tokenizer.chat_template", file.metadata.get("tokenizer.chat_template"), str))
    for name, value, kind in values:
        if value is not None and type(value) is not kind:
            raise ValueError(f"from_gguf: {name} must be of type {kind.__name__}, got {brief(value)}")


def _model(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # the library raises the plain kind
        raise ValueError(f"from_gguf: the merges of the tokenizer must fit its tokens: {str(error)[:200]}") from None


def _merges(data: dict[str, Any]) -> list[tuple[str, str]] | None:
    stored = _strings(data, "merges")
    if stored is None:
        return None
    # A part may itself begin with a blank, so the separator is the first one after it.
    pairs = ((merge, merge.find(" ", 1)) for merge in stored)
    return [(merge[:at], merge[at + 1 :]) for merge, at in pairs]


def _byte_level(data: dict[str, Any], tokens: list[str]) -> Tokenizer:
    split = data.get("pre", "default")
    if split not in _SPLITS:
        known = ", ".join(sorted(_SPLITS))
        raise ValueError(f"from_gguf: tokenizer.ggml.pre must be one of {known}, got {brief(split)}")
    merges = _merges(data)
    if merges is None:
        raise ValueError("from_gguf: a tokenizer of kind gpt2 must have tokenizer.ggml.merges, got none")
    backend = _model({token: i for i, token in enumerate(tokens)}, merges)
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[split]]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(data: dict[str, Any], tokens: list[str], kind: str) -> Tokenizer:
    """Pieces of text with a mark for each blank; what is in no piece is spelled in bytes."""
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(data)
    if merges is None:
        merges = _merges_of_scores(data, tokens, vocabulary)
    unknown = data.get("unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ValueError(
            f"from_gguf: unknown_token_id must be that of one of {len(tokens)} tokens, got {brief(unknown)}"
        )
    backend = _model(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    prefixed = bool(data.get("add_space_prefix", kind == "llama"))
    mark = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), mark]) if prefixed else mark
    if kind == "gemma4":
        backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixed else steps)
    return backend


def _merges_of_scores(data: dict[str, Any], tokens: list[str], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """A file with scores has no merges: any two pieces that join to a third do, the best third first."""
    scores, types = _numbers(data, "scores", tokens), _numbers(data, "token_type", tokens)
    if scores is None:
        raise ValueError("from_gguf: a tokenizer of kind llama must have a score for each of its tokens, got none")
    found = []
    for piece, i in vocabulary.items():
        if types is not None and types[i] in (_CONTROL, _USER_DEFINED, _BYTE):
            continue
        if len(piece) > _MAX_PIECE:
            raise ValueError(
                f"from_gguf: a piece must have at most {_MAX_PIECE} letters, got {len(piece)}: {brief(piece)}"
            )
        for at in range(1, len(piece)):
            left, right = piece[:at], piece[at:]
            if left in vocabulary and right in vocabulary:
                found.append((-float(scores[i]), vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def _begin_and_end(backend: Tokenizer, data: dict[str, Any], special: dict[str, str]) -> None:
    """What is put around a text, as llama.cpp does it where the file does not say."""
    begin = data.get("add_bos_token", data.get("model") == "llama" or data.get("pre") in _BEGIN_WITH_BOS)
    around = [
        special["bos_token"] if begin and "bos_token" in special else None,
        special["eos_token"] if data.get("add_eos_token", False) and "eos_token" in special else None,
    ]
    # Under names of our own: a token may hold a colon or a dollar, which mean something in a template.
    named = [(name, token) for name, token in zip(("first", "last"), around, strict=True) if token is not None]
    ids = [{"id": name, "ids": [backend.token_to_id(token)], "tokens": [token]} for name, token in named]
    if ids:
        first, last = ([f"{name}:0"] if token else [] for name, token in zip(("first", "last"), around, strict=True))
        backend.post_processor = processors.Sequence(
            [
                *([backend.post_processor] if backend.post_processor is not None else []),
                processors.TemplateProcessing(single=[*first, "$A:0", *last], special_tokens=ids),
            ]
        )
