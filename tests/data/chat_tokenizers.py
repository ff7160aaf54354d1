"""Small tokenizers with chat templates like those of published models: byte-level BPE with special tokens."""

from pathlib import Path

import tokenizers
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import random_text

CHATML = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

MARKED = """{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""

MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') -}}
{%- endif -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + message.content + eos_token -}}{%- endif -%}
{%- endfor -%}"""

GEMMA = """{{- bos_token -}}
{%- if messages[0].role == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}
{%- for message in messages -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{- '<start_of_turn>' + role + '\\n' + message.content | trim + '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

THINKING = """{%- for message in messages -%}
{%- set words = message.content -%}
{%- if message.role == 'assistant' and not loop.last and '</think>' in words -%}
{%- set words = words.split('</think>')[-1] -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + words + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Leaves the thinking of earlier turns out."""

TEMPLATES = {
    "chatml": CHATML,
    "marked": MARKED,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "thinking": THINKING,
}

SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"),
]

_WORDS = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Llama 3's rule, shortened: the line's ends in a row are one word."""


def make_tokenizer(folder: Path, template: str | None, *, vocab_size: int = 400) -> Path:
    """Writes the folder of a tokenizer with one of `TEMPLATES`; None: without a template."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    words = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    bytes_of_words = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([words, bytes_of_words])
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([random_text(3000), "user assistant system model" + "\n\n\nA" * 99], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if template is not None:
        fast.chat_template = TEMPLATES[template]
    fast.save_pretrained(folder)
    return folder
