"""`load` opens a trained model with its tokenizer, to generate text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from thinpipe.checkpoint import find_checkpoint, load_model, run_folder_of
from thinpipe.data.tokenizer import Tokenizer
from thinpipe.device.choice import choose_device
from thinpipe.models import Model
from thinpipe.models.generate import generate

if TYPE_CHECKING:
    from thinpipe.models.hf.decoder import HuggingFaceModel


def load(path: Path | str, *, device: str = "auto") -> "LoadedModel":
    """The model of a run folder (its newest whole checkpoint) or of a checkpoint folder.

    `device`: auto, cpu, cuda, cuda:N or mps. Raises UserError if there is no checkpoint.
    """
    checkpoint = find_checkpoint(Path(path))
    tokenizer = Tokenizer.load(run_folder_of(checkpoint) / "tokenizer")
    return LoadedModel(load_model(checkpoint, choose_device(device)), tokenizer)


@dataclass(frozen=True)
class LoadedModel:
    """A trained model in evaluation mode."""

    model: "Model | HuggingFaceModel"
    """The model, an `nn.Module`: token ids [B, T] to logits [B, T, V]."""
    tokenizer: Tokenizer

    def generate(
        self, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
    ) -> str:
        """The text that follows the prompt, without the prompt.

        Temperature 0 is greedy decoding; `top_p` samples from the smallest set of most likely tokens with at least this
        total probability. Ends after `max_new_tokens` tokens or at the end-of-text token. Raises UserError for an empty
        or too long prompt.
        """
        sampling = {"temperature": temperature, "top_p": top_p}
        return "".join(self.stream(prompt, max_new_tokens=max_new_tokens, seed=seed, **sampling))

    def stream(
        self, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
    ) -> Iterator[str]:
        """As `generate`, in pieces of whole characters, as they are generated."""
        prompt_ids = [int(token) for token in self.tokenizer.encode_batch([prompt])[0]]
        end_of_text_id = self.tokenizer.vocabulary.end_of_text_id
        tokens = generate(
            self.model,
            prompt_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            stop_id=end_of_text_id,
        )
        return self._pieces(tokens, end_of_text_id)

    def _pieces(self, tokens: Iterator[int], end_of_text_id: int) -> Iterator[str]:
        shown, new_ids = "", list[int]()
        for token in tokens:
            if token == end_of_text_id:
                return
            new_ids.append(token)
            text = self.tokenizer.decode(new_ids)
            if not text.endswith("\ufffd"):  # incomplete UTF-8 sequence: wait for the rest
                yield text[len(shown) :]
                shown = text
