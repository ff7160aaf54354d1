"""Settings of the commands new, demo, eval, generate, export, import, probe, report, completion, watch and selftest.
Imports no torch, so that `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from thinpipe.core.errors import UserError
from thinpipe.core.units import parse_duration, parse_rate


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluate a trained model: perplexity and bits per byte on the validation text."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or of a checkpoint."""
    data: Path | None = None
    """Folder of tokens, as written by `thinpipe tokenize`. Default: the run's training data folder."""
    seq_len: int | None = None
    """Tokens per sequence. Default: the run's training.seq_len."""
    batch_size: int = 8
    """Sequences per batch."""
    max_batches: int = 0
    """Maximum number of batches, evenly spaced over the validation text. 0: the whole validation text."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, not {self.batch_size}")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a text with a trained model, token by token; or show its answers to held-out chats beside those of the
    model before training."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or of a checkpoint."""
    prompt: str = "The "
    """Text to continue."""
    max_new_tokens: int = 100
    """Maximum number of tokens to generate. Generation also stops at the end-of-text token."""
    temperature: float = 0.8
    """Sampling temperature; 0: greedy decoding."""
    top_p: float = 0.95
    """Nucleus sampling: sample from the smallest set of most likely tokens with at least this total probability."""
    seed: int = 0
    """Random seed of sampling."""
    validation_chats: int = 0
    """Instead of continuing a prompt, answer this many held-out chats, evenly spaced over the validation split, by the
    base and by the trained model, side by side. For runs on a Hugging Face model (model.hf) with chats."""
    data: Path | None = None
    """Folder of tokens with the held-out chats. Default: the run's training data folder."""
    device: str = "auto"
    """Device to compute on: auto, cpu, cuda, cuda:N or mps."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError("--prompt must not be empty")
        if self.validation_chats < 0:
            raise UserError(f"--validation-chats must be at least 0, not {self.validation_chats}")
        if self.data is not None and not self.validation_chats:
            raise UserError("--data is for held-out chats: pass --validation-chats, or leave it out")


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export a trained model as a Hugging Face folder that `transformers` loads.

    A subspace model becomes a plain dense model. A model with a boundary projection comes with its modeling code. A
    Hugging Face model comes with its base's config.json and tokenizer; of one that was trained with [lora], the adapter
    is written, as peft opens it.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of a run, or of a checkpoint."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """Folder to create."""
    merge: bool = False
    """LoRA only: write the whole model with the adapters added to its weights, file by file, in place of the adapter
    alone."""
    overwrite: bool = False
    """Write into a folder that is not empty: its weights and files of the same names are replaced, others stay."""


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Convert a Hugging Face folder (Llama or GPT-2) to a subspace model that `thinpipe train` can start from. The
    conversion is lossy; its cost in loss is measured and printed. To train a model as it is, set model.hf instead."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """Hugging Face folder with safetensors weights."""
    output: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OUTPUT")]
    """Folder to create; pass it to `thinpipe train` as --model.initial."""
    subspace_width: int
    """Width of the subspace."""
    data: Path
    """Folder written by `thinpipe tokenize` with the model's tokenizer, on which the cost is measured."""
    boundaries: tuple[int, ...] = ()
    """Block indices at which the model is cut into segments."""
    free_last: bool = True
    """Leave the blocks after the last boundary dense."""

    def __post_init__(self) -> None:
        if self.free_last and not self.boundaries:
            raise UserError(
                "--free-last leaves the blocks after the last boundary dense: pass --boundaries, or --no-free-last"
            )


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Show whether a Hugging Face model can be trained in segments, and with what: tries a small random model with the
    structure of its config.json, in seconds and without its weights."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """Folder with a config.json, or the model's name on the Hugging Face hub, of which config.json alone is downloaded
    (nothing if HF_HUB_OFFLINE is set)."""
    again: bool = False
    """Try it even if a result for this configuration and these versions is kept on this machine."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Write a report of a run from its event log: a single HTML file, and Markdown. The run may still be going on."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    against: tuple[Path, ...] = ()
    """Folders of other runs to compare with: loss over time, speed, differences in loss."""
    sample: str | None = None
    """Prompt for a text sample from the newest checkpoint. Default: no sample."""
    output: Path | None = None
    """Folder to write the report to. Default: report in the run's folder."""

    def __post_init__(self) -> None:
        if self.sample == "":
            raise UserError("--sample must not be empty: write the beginning of a text")


@dataclass(frozen=True, kw_only=True)
class NewConfig:
    """Write a settings file with only what matters, and plan it at once. What no flag says is asked."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")] = Path("run.toml")
    """Settings file to write. For a run on several machines, FILE.machines.toml is written beside it."""
    goal: Literal["pretrain", "tune"] | None = None
    """pretrain: train a new model from the beginning. tune: train a Hugging Face model further, with LoRA."""
    model: str | None = None
    """pretrain: name of a model preset, for example llama-10m. tune: folder of a Hugging Face model, or hf:NAME."""
    data: str | None = None
    """Text or chats: a file, a folder or a pattern, as `thinpipe tokenize --sources` takes them, sample:train for two
    books that come with thinpipe, or a folder of tokens."""
    where: Literal["alone", "lan", "friends"] | None = None
    """alone: on this machine. lan: on machines of one fast network. friends: over ordinary internet links."""
    machines: tuple[str, ...] = ()
    """lan and friends: the device of each machine, for example "RTX 3060"; here: this machine."""
    overwrite: bool = False
    """Replace a file that is there."""


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Show what thinpipe does, on this machine, in about three minutes: four processes behind emulated home links train
    with whole and with thin messages; then four peers of a hub train, one of them is killed and comes back. Ends with
    one picture."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")] = Path("demo")
    """Folder to create, for the picture and the three runs."""
    seconds: float = 40.0
    """Seconds of training of each of the three runs, after they have started."""
    rate: str = "20mbps"
    """Rate of each emulated link, up and down."""
    latency: str = "20ms"
    """One-way latency of each emulated link."""

    def __post_init__(self) -> None:
        if not 10 <= self.seconds <= 3600:
            raise UserError(f"--seconds must be between 10 and 3600, not {self.seconds:g}")
        parse_rate(self.rate), parse_duration(self.latency)


@dataclass(frozen=True, kw_only=True)
class CompletionConfig:
    """Print a script that lets your shell complete commands, flags, their values and files. bash: add `eval "$(thinpipe
    completion bash)"` to ~/.bashrc; zsh: the same with zsh to ~/.zshrc; fish: `thinpipe completion fish | source` in
    ~/.config/fish/config.fish."""

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]
    """bash, zsh or fish."""


PORT = 8080
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Monitor a running or finished run, in the terminal or in a web dashboard."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The dump_folder of the run; for a run with a hub, the hub's dump_folder."""
    once: bool = False
    """Print the current state once and exit, for pipes and scripts."""
    dashboard: bool = False
    """Serve a web dashboard instead of the terminal view."""
    host: str = LOOPBACK
    """Address on which to serve the dashboard. There is no login: anyone who can reach the address can read it."""
    port: int = PORT
    """Port of the dashboard; 0: any free port."""

    def __post_init__(self) -> None:
        if self.once and self.dashboard:
            raise UserError("--once prints and --dashboard serves a page: leave one of them out")
        if not self.dashboard and (self.host, self.port) != (LOOPBACK, PORT):
            raise UserError("--host and --port are for the web dashboard: pass --dashboard, or leave them out")
        if not 0 <= self.port < 65536:
            raise UserError(f"--port must lie between 0 and 65535, not {self.port}")


@dataclass(frozen=True, kw_only=True)
class SelftestConfig:
    """Prove that this machine computes right, and measure it: numbers against float64, copies, several processes,
    memory and speed. Takes three minutes and needs no hub."""

    device: str = "auto"
    """Device to test: auto, cpu, cuda, cuda:N or mps."""
    minutes: float = 3.0
    """Duration in minutes. What the other checks leave of it is used for sustained speed."""
    quick: bool = False
    """Take half a minute: fewer steps, and no sustained speed."""
    output: Path = Path("selftest")
    """Folder to write selftest.json and selftest.md to, for an issue. Files of an earlier test are replaced."""

    def __post_init__(self) -> None:
        if not 0 < self.minutes < 24 * 60:
            raise UserError(f"--minutes must be above 0 and below a day, not {self.minutes:g}")
        if self.quick and self.minutes != 3.0:
            raise UserError("--quick says how long the test takes: leave --minutes out")
