"""Step engine: forward, backward and optimizer update for the segments of this process.

The process holds all segments (single process) or those of its pipeline stages; the training loop sees no difference.
One small all-reduce per step carries the gradient norm of every parameter, the loss, stop requests, message checks and
link statistics. Norms are summed in layer order, so gradient clipping is bit-identical for every placement.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinpipe.checkpoint import Checkpoint, codec_states, layers_of, restore, restore_codec_states, state_by_layer
from thinpipe.config.offload import keeps_masters
from thinpipe.config.precision import describe_choice, recipe_of
from thinpipe.config.run import RunConfig
from thinpipe.core.errors import UserError
from thinpipe.core.foreign import decode_foreign
from thinpipe.device.choice import choose_device, make_current
from thinpipe.device.memory import device_name, peak_nbytes
from thinpipe.device.precision import has_bf16_units, keep_casts, set_float32_products
from thinpipe.models.protocol import PipelineModelConfig, build_model, refuse_packing, trainable_parameters
from thinpipe.optim import RowwiseAdamW
from thinpipe.optim.gradient_sums import GradientSums, gradient_norms
from thinpipe.optim.master_weights import keep_masters_on_host, set_weights, weights_of
from thinpipe.optim.rowwise_adamw import parameter_groups
from thinpipe.pipeline.boundary_methods import boundary_method
from thinpipe.pipeline.chat_loss import ChatLoss
from thinpipe.pipeline.placement import place
from thinpipe.pipeline.runner import Runner, TwinRunner
from thinpipe.pipeline.sanity import MessageSanityCheck
from thinpipe.pipeline.stage_module import StageModule
from thinpipe.subspace import Basis, BasisUpdate, GrassmannTracker, Subspace, rebase_squares
from thinpipe.training.step_outcome import StepOutcome, outcome_of
from thinpipe.training.step_vector import StepVector, trained_scale
from thinpipe.transport.collectives import Collectives, collectives_for

Ids = npt.NDArray[np.int64]


class Engine:
    """Model segments, optimizer, basis tracker and pipeline runner of this process.

    With a process group, the schedule assigns segments to this rank; without one, the process holds all segments.
    """

    def __init__(
        self,
        config: RunConfig,
        model_config: PipelineModelConfig,
        group: dist.ProcessGroup | None = None,
        collectives: Collectives | None = None,
        *,
        chats: bool = False,
    ) -> None:
        """`chats`: token ids have flags (`core.token_flags`), and the loss is a mean over the trained tokens."""
        self.config, self.group, self.collectives = config, group, collectives or collectives_for(group)
        self.device = choose_device(config.training.device)
        make_current(self.device)
        asked, units = config.training.precision, has_bf16_units(self.device)
        self.recipe = recipe_of(asked, has_bf16_units=units, device=device_name(self.device))
        self.precision = describe_choice(asked, self.recipe, has_bf16_units=units)
        set_float32_products(self.device, tf32=self.recipe.uses_bf16)
        dtype = getattr(torch, self.recipe.weights)
        self.model = build_model(model_config)
        self.names = [*trainable_parameters(self.model)]
        parallelism, count = config.parallelism, len(self.model.segments)
        if config.training.packing:
            refuse_packing(model_config)
        self.chat_loss = ChatLoss(packing=bool(config.training.packing)) if chats else None
        self.step_vector = StepVector(
            self.names,
            boundaries=count - 1,
            processes=self.collectives.size,
            batch_tokens=config.training.global_batch_size * config.training.seq_len if chats else None,
        )
        self.placement = place(
            parallelism.pipeline_parallel_schedule, self.collectives.size, count, parallelism.pipeline_parallel_shares
        )
        self.local_segments = self.placement.segments_of(self.collectives.rank)
        self.process_of_segment = self.placement.process_of_segment
        self.segment_of = {
            name: index for index, segment in enumerate(self.model.segments) for name, _ in segment.named_parameters()
        }
        self.sanity = MessageSanityCheck()
        for index in self.local_segments:
            self.model.segments[index].materialise(seed=config.debug.seed, device=self.device, dtype=dtype)
            if keeps_masters(config.training.offload, self.recipe, parallelism.pipeline_parallel_schedule):
                keep_masters_on_host(self.model.segments[index].blocks)
        self.model.set_execution(config.execution, autocast_bf16=self.recipe.autocast_bf16)
        self.parameters = trainable_parameters(*(self.model.segments[index] for index in self.local_segments))
        self.optimizer = self._make_optimizer()
        # Copies of offloaded masters are bfloat16 under autocast; adapters are float32 on a bfloat16 base.
        is_bf16 = self.recipe.weights == "bfloat16" and dtype in {each.dtype for each in self.parameters.values()}
        self.gradient_sums = GradientSums(self.parameters, seed=config.debug.seed) if is_bf16 else None
        self.tracker = self._make_tracker()
        self.methods = [boundary_method(model_config, config, chats=chats) for _ in range(count - 1)]
        self.runner = self._make_runner()
        self._check_same_hashes()

    def _make_optimizer(self) -> RowwiseAdamW:
        settings = self.config.optimizer
        tables = {
            module.weight
            for index in self.local_segments
            for module in self.model.segments[index].modules()
            if isinstance(module, nn.Embedding)
        }
        return RowwiseAdamW(
            parameter_groups(self.parameters, tables, matrix_lr_factor=settings.matrix_lr_factor or 1.0),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            second_moment=settings.second_moment,
            seed=self.config.debug.seed,
            offload=self.config.training.offload == "optimizer",
        )

    def _make_tracker(self) -> GrassmannTracker | None:
        """The basis tracker, in the process with the last segment; None elsewhere, or if the basis is fixed."""
        basis = self.config.basis
        if not isinstance(self.model.space, Subspace) or not basis.interval or not self.has_last:
            return None
        tracker = GrassmannTracker(self.model.space.basis, step_size=basis.step_size)
        self.model.segments[-1].on_gradient = tracker.observe
        return tracker

    def _make_runner(self) -> Runner:
        stage_modules = [
            StageModule(
                self.model.segments,
                self.placement.stages[stage],
                self.methods,
                seed=self.config.debug.seed,
                sanity=self.sanity,
                chat_loss=self.chat_loss,
            )
            for stage in self.placement.processes[self.collectives.rank]
        ]
        if self.group is None:
            return TwinRunner(stage_modules[0])
        from thinpipe.pipeline.pipeline_runner import PipelineRunner  # importing torch's pipelining takes over a second

        parallelism = self.config.parallelism
        return PipelineRunner(
            stage_modules,
            self.placement,
            self.group,
            schedule=parallelism.pipeline_parallel_schedule,
            extra=parallelism.pipeline_parallel_extra_microbatches,
            microbatches=self.config.microbatches,
            device=self.device,
        )

    @property
    def has_first(self) -> bool:
        return 0 in self.local_segments

    @property
    def has_last(self) -> bool:
        return len(self.model.segments) - 1 in self.local_segments

    def step(
        self, index: int, ids_BW: Ids | None, lr: float, *, asked_to_stop: Callable[[], bool] = lambda: False
    ) -> StepOutcome:
        """Forward, backward and optimizer update on one global batch.

        After a fault there is no update, and codec state and tracker sums are rolled back: the step can be repeated
        bit for bit. `ids_BW` is required in the process with the first segment. `asked_to_stop` is evaluated once,
        after the backward pass; its result is shared with all processes.
        """
        self.model.train()
        self.optimizer.zero_grad()
        if self.gradient_sums is not None:
            self.gradient_sums.begin(index)
        self.sanity.begin()
        self._begin_batch()
        for method in self.methods:
            method.snapshot()
        before = None if self.tracker is None else (self.tracker.su_DK.clone(), self.tracker.trace.clone())
        with keep_casts() if self.collectives.size > 1 else nullcontext():  # else one micro-batch is in flight
            loss = self.runner.gradients(index, self._microbatches(ids_BW))
        if self.gradient_sums is not None:
            self.gradient_sums.finish()
        outcome = outcome_of(
            self.step_vector,
            self.collectives.all_reduce_step(self._contribution(loss, stop=asked_to_stop())),
            process_of_segment=self.process_of_segment,
            segments=self.segment_of,
        )
        if outcome.fault is None:
            self.sanity.accept()
            self._update(outcome.grad_norm, lr, outcome.gradient_scale)
            return outcome
        for method in self.methods:
            method.rollback()
        if self.tracker is not None and before is not None:
            self.tracker.su_DK, self.tracker.trace = before
        return outcome

    def _begin_batch(self) -> None:
        if self.chat_loss is not None:
            self.chat_loss.begin()

    @property
    def _trained_tokens(self) -> int:
        """Trained tokens of this batch, in the process with the last segment; 0 elsewhere and for plain text."""
        return 0 if self.chat_loss is None else self.chat_loss.trained_tokens

    def _microbatches(self, ids_BW: Ids | None) -> tuple[Tensor, ...]:
        if ids_BW is None or not self.has_first:
            return ()
        parts: tuple[Tensor, ...] = torch.from_numpy(ids_BW).to(self.device).split(self.config.microbatch_size)
        return parts

    def _contribution(self, loss: float | None, *, stop: bool) -> list[float]:
        """This process's part of the step's sum (`training.step_vector`)."""
        count = 1 if self.gradient_sums is None else self.config.microbatches
        received = {(part.boundary, part.forward): part for part in self.runner.received()}
        sent, got = self.sanity.figures.whole(sent=True), self.sanity.figures.whole(sent=False)
        return self.step_vector.pack(
            loss=loss or 0.0,
            stops=float(stop),
            gradient_norms={name: norm / count for name, norm in gradient_norms(self.parameters).items()},
            of_ends={
                "sent_rms": {end: figures.rms for end, figures in sent.items()},
                "sent_mean": {end: figures.mean for end, figures in sent.items()},
                "received_rms": {end: figures.rms for end, figures in got.items()},
                "received_mean": {end: figures.mean for end, figures in got.items()},
                "not_finite": self.sanity.not_finite(),
                "outliers": self.sanity.outliers(),
                "nbytes": {end: float(part.nbytes) for end, part in received.items()},
                "waited_seconds": {end: part.waited_seconds for end, part in received.items()},
            },
            of_process={
                "seconds": self.runner.seconds,
                "idle_seconds": sum(part.waited_seconds for part in received.values()),
                "peak_nbytes": float(peak_nbytes(self.device)),
            },
            rank=self.collectives.rank,
            trained_tokens=self._trained_tokens,
        )

    def _check_same_hashes(self) -> None:
        """Raises UserError unless all processes have the same basis and fixed tables. Collective call."""
        hashes = self.model.space.hashes
        if not hashes:
            return
        numbers = [float(int(value[:12], 16)) for value in hashes.values()]
        for (name, value), equal in zip(hashes.items(), self.collectives.all_equal(numbers), strict=True):
            if not equal:
                raise UserError(
                    f"the processes differ in {name} (process {self.collectives.rank} has {value}): "
                    "start all processes from the same checkpoint and with the same settings"
                )

    def _update(self, grad_norm: float, lr: float, gradient_scale: float) -> None:
        """`grad_norm`: of the gradients times `gradient_scale`."""
        factor = min(self.config.training.max_norm / (grad_norm + 1e-6), 1.0) * gradient_scale
        if self.gradient_sums is not None:
            self.optimizer.gradient_factor = factor / self.config.microbatches
        elif factor != 1:
            torch._foreach_mul_([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_factor", 1.0)  # 1.0 is exact
        self.optimizer.step()

    def evaluate(self, batches: Iterable[Ids | None]) -> tuple[float, int]:
        """Mean loss per token over whole global batches, and the number of tokens; of chats, per trained token.

        Messages are encoded by the boundary methods' inference variants. Every process must pass the same number of
        batches; ids are required in the process with the first segment.
        """
        self.model.eval()
        losses, trained = [], []
        for ids_BW in batches:
            self._begin_batch()
            loss = self.runner.loss(self._microbatches(ids_BW))
            counted = [] if self.chat_loss is None else [float(self._trained_tokens)]
            found = self.collectives.all_reduce_sum([loss or 0.0, *counted])
            losses.append(found[0])
            trained += found[1:]
        if not losses:
            return math.nan, 0
        tokens = len(losses) * self.config.training.global_batch_size * self.config.training.seq_len
        mean = math.fsum(losses) / len(losses)
        if self.chat_loss is None:
            return mean, tokens
        scale = trained_scale(math.fsum(trained), tokens)
        return (mean * scale, round(tokens / scale)) if scale > 0 else (math.nan, 0)

    def basis_is_due(self, finished_steps: int) -> bool:
        """True if the basis is updated after this many finished steps."""
        interval = self.config.basis.interval
        return isinstance(self.model.space, Subspace) and interval > 0 and finished_steps % interval == 0

    def update_basis(self, ids_BW: Ids | None) -> BasisUpdate:
        """Moves the basis by one Grassmann step and measures the loss on `ids_BW` before and after.

        All processes must call this; all return the result of the process with the last segment.
        """

        def measure() -> float:
            return self.evaluate([ids_BW])[0]

        if self.tracker is not None:
            update = self.tracker.update(self._change_basis, measure)
            announced = msgspec.msgpack.encode(update)  # unlike JSON, msgpack can encode NaN
        else:
            assert isinstance(self.model.space, Subspace)
            measure()
            self._change_basis(self.model.space.basis, None)
            measure()
            announced = b""
        return decode_foreign(self.collectives.broadcast_bytes(announced, self.placement.last_process), BasisUpdate)

    def _change_basis(self, old: Basis, new: Basis | None) -> float:
        """Broadcasts the new basis from the last process; every process maps its own parameters and moments to it.

        Returns the ratio of the parameter norms after and before the change.
        """
        assert isinstance(self.model.space, Subspace)
        matrix_DK = (new or old).matrix_DK.clone(memory_format=torch.contiguous_format)
        self.collectives.broadcast(matrix_DK, self.placement.last_process)
        new = Basis(matrix_DK, old.version + 1)
        squares = rebase_squares(self.parameters, self.optimizer, old, new)
        self.model.space.basis = new
        self._check_same_hashes()
        shared = self.collectives.all_reduce_sum(
            [number for name in self.names for number in squares.get(name, (0.0, 0.0))]
        )
        before, after = math.fsum(shared[0::2]), math.fsum(shared[1::2])
        return math.sqrt(after / before) if before else 1.0

    @property
    def layers(self) -> list[str]:
        """Names of the checkpoint layers that this process needs."""
        return layers_of(self.parameters)

    @property
    def codec_state_layers(self) -> list[str]:
        """Names of the checkpoint layers with the codec state of this process's boundaries."""
        return list(codec_states(self.methods, self.local_segments))

    def weights(self) -> dict[str, Tensor]:
        """Copies of this process's trained weights, in float32 in host memory."""
        return {name: weights_of(each).to("cpu", torch.float32, copy=True) for name, each in self.parameters.items()}

    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            set_weights(parameter, weights[name])

    def forget_steps(self) -> None:
        """The next step begins without moments, as the first one of a run."""
        self.optimizer.state.clear()

    def state(
        self, *, with_space: bool, beside: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Tensors that this process saves, by layer.

        `with_space`: include the basis and fixed tables. They are identical in every process, so one process per
        checkpoint folder saves them. `beside`: see `state_by_layer`.
        """
        space = self.model.space if with_space else None
        model = state_by_layer(self.parameters, space, self.optimizer, self.tracker, beside)
        return model | codec_states(self.methods, self.local_segments)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores weights, basis, optimizer, tracker and codec state: training continues exactly."""
        restore(checkpoint, self.parameters, self.model.space, self.optimizer, self.tracker)
        restore_codec_states(checkpoint, self.methods, self.local_segments)
        self._check_same_hashes()

    def start_from(self, checkpoint: Checkpoint) -> None:
        """Loads weights and basis only; optimizer, tracker and codec state start fresh."""
        restore(checkpoint, self.parameters, self.model.space)
        self._check_same_hashes()
        if self.tracker is not None and isinstance(self.model.space, Subspace):
            self.tracker.restart(self.model.space.basis)
